"""The server and the playground around an Engine: `laneformer serve`."""
