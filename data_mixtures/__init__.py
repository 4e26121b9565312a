"""Recipes (TOML) -> token shards with manifests (`prepare`) -> the order of a run (`Mixture`)."""
