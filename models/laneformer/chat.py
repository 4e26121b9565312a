"""Roles of a conversation's messages, and the error for one that has no form; prompts.py renders them."""

from __future__ import annotations

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


class ChatError(ValueError):
    """A conversation that the template has no form for; `reason` is one word, to count by."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason
