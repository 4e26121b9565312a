"""Laneformer for Hugging Face Transformers: config, models, tokenizer and chat template
of an exported folder.
"""
