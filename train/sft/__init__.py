"""The third stage's data: conversations to packed windows with a mask, and identity conversations."""
