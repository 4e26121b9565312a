"""A server whose model says what a test has written, whatever it is asked: for clients that need a sensible one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.laneformer.serve.conftest import Server, start

PRELUDE = """
from laneformer.serve.choices import Choices, Piece
SCRIPT = {script}
asked = []
async def scripted(self, choice):
    prompt = self.context.tokenizer.decode(self.prompts[0], skip_special_tokens=False)
    said = [answer for key, answer in SCRIPT if key in prompt]
    text = said[-1]
    for start in range(0, len(text), 5):
        yield Piece(choice, text[start : start + 5], (), [0])
        self.generated[choice] += 1
    yield Piece(choice, finish_reason="stop")
Choices._choice, Choices.begin = scripted, lambda self: None
"""


def scripted(folder: Path, script: list[tuple[str, str]], **options: Any) -> Server:
    """script: texts in a prompt and what is answered then; the last one that is found holds."""
    prelude = PRELUDE.replace("{script}", repr(json.loads(json.dumps(script))))
    return start(folder, prelude, **options)
