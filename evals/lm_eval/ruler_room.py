"""Whether RULER's prompts can be made at the lengths asked, found out before lm-eval tries to.

lm-eval shortens a text until it fits. Where even the shortest does not, its needle tasks say so, but `ruler_vt` tries
for ever (a bare `except` takes Ctrl-C as well) and `ruler_cwe` asks for words of an empty list, which it cannot score.
So the shortest prompts of these two, made by lm-eval's own functions, are measured here; a tokenizer with few pieces
makes them longest. Prompts vary by some tokens with the words drawn, so the longest of several counts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DRAWS = 20
# kept in the code of lm-eval's ruler/vt_utils.py and ruler/cwe_utils.py: the tokens of vt's worked example and of the
# answers, and the fewest units (sentences, words) that a text is tried with
VT_EXAMPLE_TOKENS, VT_EXAMPLE_UNITS, VT_UNITS, VT_ANSWER_TOKENS = 500, 5, 10, 30
CWE_UNITS, CWE_ANSWER_TOKENS = 10, 120


def check_room(names: Sequence[str], lengths: Sequence[int], folder: Path) -> None:
    """ValueError names the task and the tokens that it needs where one cannot be made with the folder's tokenizer."""
    for name, shortest in (("ruler_vt", shortest_vt), ("ruler_cwe", shortest_cwe)):
        if name not in names:
            continue
        from lm_eval.tasks.ruler.common_utils import get_tokenizer

        for length in lengths:
            needed = shortest(get_tokenizer(str(folder)), length)
            if needed > length:
                raise ValueError(
                    f"{name} cannot be made at a length of {length}: with the tokenizer of {folder} its shortest "
                    f"prompt and answer take {needed} tokens; give longer --lengths, or leave it out of --tasks"
                )


def shortest_vt(tokenizer: Any, length: int) -> int:
    """Tokens of the shortest variable-tracking prompt, which begins with a worked example, and of its answer."""
    from lm_eval.tasks.ruler import vt_utils

    def longest(units: int, example: bool) -> int:
        drawn = [vt_utils.generate_input_output(units, 1, 4, is_icl=example) for _ in range(DRAWS)]
        return max(tokens(tokenizer, f"{text} {answer}") for text, answer in drawn) + VT_ANSWER_TOKENS

    needed = longest(VT_EXAMPLE_UNITS, example=True)
    if needed > VT_EXAMPLE_TOKENS:
        raise ValueError(
            f"ruler_vt cannot be made: lm-eval has {VT_EXAMPLE_TOKENS} tokens for its worked example, whatever the "
            f"length, and with the tokenizer of {tokenizer.name_or_path} it takes {needed}; leave it out of --tasks"
        )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # it prints every length it tries
        (example,) = vt_utils.sys_vartrack_w_noise_random(
            tokenizer, num_samples=1, max_seq_length=VT_EXAMPLE_TOKENS, incremental=VT_EXAMPLE_UNITS
        )
    worked = tokens(tokenizer, f"{example['input']} {' '.join(example['outputs'])}\n\n")
    return worked + longest(VT_UNITS, example=False)


def shortest_cwe(tokenizer: Any, length: int) -> int:
    """Tokens of the shortest common-words prompt of this length's kind, its worked example and its answer."""
    from lm_eval.tasks.ruler import cwe_utils

    state = cwe_utils.RNG.getstate()  # its own, seeded at import: the documents come from it
    drawn = [cwe_utils.generate_input_output(CWE_UNITS, length) for _ in range(DRAWS)]
    cwe_utils.RNG.setstate(state)
    return CWE_ANSWER_TOKENS + max(
        tokens(tokenizer, f"{example}\n{text} {' '.join(f'{i}. {word}' for i, word in enumerate(answer, 1))}")
        for example, text, answer in drawn
    )


def tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text).input_ids)
