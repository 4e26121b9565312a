"""The APIs of the server: each translates its bodies and answers to one conversation of the model."""
