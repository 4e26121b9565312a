"""The restartable stages from a recipe to token shards; table.py lists them in order."""
