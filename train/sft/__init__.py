"""Data of supervised fine-tuning: conversations to packed windows with a mask, and identity conversations."""
