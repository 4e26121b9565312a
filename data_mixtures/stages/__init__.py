"""The restartable stages from a recipe to token shards; pipeline.py lists them in order."""
