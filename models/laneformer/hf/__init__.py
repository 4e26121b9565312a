"""Laneformer for Hugging Face Transformers: config, models, tokenizer and template of an exported folder."""
