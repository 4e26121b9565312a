"""The APIs of the server, each a translation to one conversation of the model."""
