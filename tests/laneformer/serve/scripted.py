"""A model that gives scripted answers, for clients that need sensible ones."""

PIECE_CHARS = 5


def play(script, patch):
    """Make every server of this process answer by a script.

    Args:
        script: tuples of a text in the prompt, the answer, and optionally the finish reason ("stop" by
            default); the last one that matches holds.
    """
    from laneformer.serve.choices import Choices, Piece

    async def say(self, choice):
        prompt = self.context.tokenizer.decode(self.prompts[0], skip_special_tokens=False)
        text, *reason = [answer for key, *answer in script if key in prompt][-1]
        for start in range(0, len(text), PIECE_CHARS):
            yield Piece(choice, text[start : start + PIECE_CHARS], (), [0])
            self.generated[choice] += 1
        yield Piece(choice, finish_reason=(reason or ["stop"])[0])

    patch.setattr(Choices, "_follow_choice", say)
    patch.setattr(Choices, "begin", lambda self: None)
