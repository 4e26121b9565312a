"""The third stage's data: conversations to packed windows with a mask, and the
generator of identity conversations.

Training itself is the trainer's: a mixture of packed conversations is a mixture. No torch here.
"""
