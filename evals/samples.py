"""What a model writes after a few prompts, greedy and as one seeded sample: for people, checkpoint after checkpoint.

    python -m evals.samples runs/demo/hf --max-new-tokens 64 --out runs/demo/evals.jsonl --step 200 --phase phase2

A line of --prompts is {"name", "text"}, which the model continues, or {"name", "messages"}, which it answers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated

from pydantic import Field

from data_mixtures.readers.local import json_objects
from evals.scorer import (
    LOCAL,
    AnswererFlags,
    AnyPrompt,
    identify_model,
    load_tokenizer,
    open_scorer,
)
from evals.tables import console
from records.command import Count, check_ranges
from records.evals import NOWHERE, AboutFlags, EvalCommand, ModelFolder, optional
from records.files import JsonObject

BUILT_IN = Path(__file__).with_suffix(".jsonl")


def main(
    hf_dir: ModelFolder,
    prompts: Annotated[Path | None, optional("FILE", "four built-in prompts")] = None,
    max_new_tokens: Count = 64,
    temperature: Annotated[float, Field(ge=0.01, le=100)] = 0.8,
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0,
    answerer: AnswererFlags = LOCAL,
    about: AboutFlags = NOWHERE,
) -> JsonObject:
    """Let a model continue prompts. The last line on stdout is the record, JSON.

    Args:
        prompts: file of JSON lines {"name", "text"} or {"name", "messages"}
        max_new_tokens: maximum length of a generated text in tokens
        temperature: sampling temperature of the second text of each prompt; the first is greedy
        seed: sampling seed
    """
    check_ranges(main, locals())
    chosen = read_prompts(prompts or BUILT_IN)
    # a base model has no chat template, and cannot answer the built-in chat prompt
    if not prompts and not load_tokenizer(hf_dir).chat_template:
        chosen = [prompt for prompt in chosen if "text" in prompt]
    scorer = open_scorer(hf_dir, answerer)
    samples = []
    for prompt in chosen:
        written = {}
        for name, heat in (("greedy", 0.0), ("sampled", temperature)):
            try:
                text: AnyPrompt = prompt.get("messages") or prompt["text"]
                written[name] = scorer.generate(
                    text, max_new_tokens, temperature=heat, seed=seed
                ).text
            except ValueError as error:
                raise ValueError(f"prompt {prompt['name']!r}: {error}") from None
        samples.append({"name": prompt["name"], "prompt": format_prompt(prompt), **written})
        console.print(f"{format_prompt(prompt)}→ {written['greedy']}", markup=False)
    scorer.close()
    return about.append(
        "samples",
        {
            "samples": samples,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
        },
        data_sha256=hashlib.sha256(json.dumps(chosen).encode()).hexdigest(),
        **identify_model(hf_dir, scorer),
    )


def read_prompts(path: Path) -> list[JsonObject]:
    """Read the prompts of a file; ValueError names the first line that is none."""
    prompts = []
    for number, prompt in json_objects(path):
        has_name = isinstance(prompt, dict) and isinstance(prompt.get("name"), str)
        if not has_name or isinstance(prompt.get("text"), str) == isinstance(
            prompt.get("messages"), list
        ):
            raise ValueError(
                f'{path}:{number}: not {{"name", "text"}} or {{"name", "messages"}}: {prompt}'
            )
        prompts.append(prompt)
    if len({prompt["name"] for prompt in prompts}) < max(1, len(prompts)):
        raise ValueError(
            f"{path} holds no prompts, or two of one name; give each a name of its own"
        )
    return prompts


def format_prompt(prompt: JsonObject) -> str:
    return (
        "\n".join(f"{m['role']}: {m['content']}" for m in prompt.get("messages") or ())
        or prompt["text"]
    )


COMMAND = EvalCommand("samples", main, reads=("--prompts",))


if __name__ == "__main__":
    COMMAND.run()
