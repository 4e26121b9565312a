"""Names of the roles in a conversation, and the error for one that a template refuses.

prompts.py renders conversations; engine/channels.py parses answers; serve/conversation.py does both for a server.
"""

from __future__ import annotations

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


class ChatError(ValueError):
    """A conversation that the template has no form for; `reason` is one word, to count by."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason
