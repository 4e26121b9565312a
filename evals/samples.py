"""What a model writes after a few prompts, greedy and as one seeded sample: for people, checkpoint after checkpoint.

    python -m evals.samples runs/demo/hf --max-new-tokens 64 --out runs/demo/evals.jsonl --step 200 --phase phase2

A line of --prompts is {"name", "text"}, which the model continues, or {"name", "messages"}, which it answers in the
folder's chat template; the built-in prompts are prose, a fact, code and, where there is a template, a question.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from evals.scorer import Scorer, open_scorer
from records.evals import NOWHERE, AboutFlags, EvalCommand
from records.files import file_sha256, json_lines

PROMPTS = (
    {"name": "prose", "text": "The old lighthouse keeper had not spoken to anyone for weeks when"},
    {"name": "fact", "text": "The capital of France is"},
    {"name": "code", "text": 'def is_prime(n: int) -> bool:\n    """Whether n is a prime number."""\n'},
    {"name": "chat", "messages": [{"role": "user", "content": "Why is the sky blue?"}]},
)


def main(
    hf_dir: Annotated[Path, tyro.conf.Positional],
    prompts: Path | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    seed: int = 0,
    about: AboutFlags = NOWHERE,
    device: str = "auto",
) -> dict[str, Any]:
    """Let a model continue prompts. The last line on stdout is the record, JSON.

    Args:
        hf_dir: folder of the exported model
        prompts: file of JSON lines with prompts; default: the built-in ones
        max_new_tokens: most tokens of a text
        temperature: of the sampled text, from the whole distribution
        seed: of the sampled text
        about: options of the record
        device: device that runs the model: auto, cpu or cuda
    """
    started = time.perf_counter()
    if max_new_tokens < 1 or temperature <= 0:
        raise ValueError(f"--max-new-tokens {max_new_tokens} must be at least 1, --temperature {temperature} above 0")
    template = chat_template(hf_dir)
    asked = read_prompts(prompts) if prompts else [p for p in PROMPTS if template or "text" in p]
    scorer, samples, console = open_scorer(hf_dir, device), [], Console(stderr=True)
    for prompt in asked:
        ids, shown = encode(scorer, prompt, template)
        room = min(max_new_tokens, scorer.max_length - len(ids))
        if room < 1:
            raise ValueError(f"prompt {prompt['name']!r}: {len(ids)} tokens fill the context of {scorer.max_length}")
        texts = {"greedy": 0.0, "sampled": temperature}
        written = {name: text_after(scorer, ids, scorer.generate(ids, room, t, seed)) for name, t in texts.items()}
        samples.append({"name": prompt["name"], "prompt": shown, **written})
        console.print(f"{shown}→ {written['greedy']}", markup=False)
    backend = scorer.name
    scorer.close()
    return about.append(
        "samples",
        {"samples": samples, "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed,
         "backend": backend},
        seconds=time.perf_counter() - started,
        tokenizer_sha256=file_sha256(hf_dir / "tokenizer.json"),
        data_sha256=hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
    )  # fmt: skip


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file. Raises ValueError with the number of a line that is none."""
    found = []
    for number, prompt in json_lines(path.read_text(encoding="utf-8").splitlines(), path):
        known = isinstance(prompt, dict) and isinstance(prompt.get("name"), str)
        if not known or isinstance(prompt.get("text"), str) == isinstance(prompt.get("messages"), list):
            raise ValueError(f'{path}:{number}: not {{"name", "text"}} or {{"name", "messages"}}: {prompt}')
        found.append(prompt)
    if len({prompt["name"] for prompt in found}) < max(1, len(found)):
        raise ValueError(f"{path} holds no prompts, or two of one name; give each a name of its own")
    return found


def chat_template(folder: Path) -> Any:
    """The folder's tokenizer if it has a chat template, else None."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer if tokenizer.chat_template else None


def encode(scorer: Scorer, prompt: dict[str, Any], template: Any) -> tuple[list[int], str]:
    """(ids, the prompt as it is shown) of a prompt."""
    if "text" in prompt:
        return scorer.encode(prompt["text"], special_tokens=True), prompt["text"]
    if template is None:
        raise ValueError(f"prompt {prompt['name']!r} has messages, but the folder has no chat template; give it a text")
    text = template.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
    return scorer.encode(text), "\n".join(f"{m['role']}: {m['content']}" for m in prompt["messages"])


def text_after(scorer: Scorer, ids: list[int], new: list[int]) -> str:
    """The text of new ids behind a prompt, as the engine streams it."""
    from laneformer.engine.text import TextStream

    tokenizer: Any = scorer  # of which it needs `decode` and `id_to_token`
    text = TextStream(tokenizer, ids)
    return "".join([*map(text.push, new), text.finish()])


COMMAND = EvalCommand("samples", main)


if __name__ == "__main__":
    COMMAND.run()
