"""`python -m train.own_outputs HF_DIR --lock L.lock.json --out DIR`: what a model itself writes, as a job's
mixture.

    DIR/outputs.jsonl a line for each prompt: its number, its length, the ids of prompt and continuation

    DIR/own_outputs/source.json, shard-NNNNN.bin, shard-NNNNN.flags.bin, valid.bin, valid.flags.bin
    DIR/own_outputs.lock.json

A head that drafts tokens learns from these (configs/mtp.toml), and a model made late can (tools.delay_a_model).
The prompts begin texts of another mixture: the first tokens of a window, or what comes before the first reply of a
conversation. They are inputs only; the continuations are trained. Killed at any moment, it goes on with the first
prompt that has no line.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
import xxhash

from data_mixtures import mixture, shards
from data_mixtures.mixture import BEGINS, TRAINED, Mixture
from data_mixtures.tokenizer import facts
from laneformer import Engine
from laneformer.chat import ASSISTANT, ChatError
from laneformer.prompts import PromptEncoder
from records.files import file_sha256, hold_lock, read_lines

from .sft.conversations import Conversation, messages, rows
from .sft.source import Rules, facts_of, write_source

SOURCE = "own_outputs"
OUTPUTS = "outputs.jsonl"


@dataclass
class Arguments:
    """Whose outputs, on what, and how many."""

    model: tyro.conf.Positional[Path]
    """Hugging Face folder, or GGUF file, of the model that writes"""
    lock: Path
    """Lock file of the mixture whose texts are begun, such as that of the last phase"""
    out: Path
    """The data folder that is written"""
    conversations: tuple[str, ...] = ()
    """Files or datasets as for `train.sft`: after each text of the mixture one of these is begun, in the model's own
    chat template, until all have been
    """
    prompts: int = 20_000
    """Texts that are begun"""
    prompt_tokens: int = 64
    """Tokens of a prompt, where it is no conversation; longer ones are left out"""
    new_tokens: int = 448
    """Tokens that follow, at most"""
    temperature: float = 0.0
    """Of the continuations; 0: the likeliest token, as in greedy decoding"""
    at_a_time: int = 8
    """Continuations that are generated side by side, at most 8"""
    seq_len: int | None = None
    """Tokens of a window, training.seq_len of the job; default: that of the mixture"""
    holdout: float = 0.01
    """Share of the texts held out for validation, chosen by a hash of their content"""
    seed: int = 1
    """Decides the random numbers of the continuations, and the order of the windows"""
    epoch_cap: int = 4
    """How often a job may read the texts before it is refused"""
    dtype: str = "auto"
    """Data type of the weights while generating"""


def main() -> None:
    """A user error prints one line and exits with status 1."""
    arguments = tyro.cli(Arguments, prog="python -m train.own_outputs", description=__doc__)
    try:
        print(f"{run(arguments)}")
    except (ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(1) from None


def run(arguments: Arguments) -> Path:
    """Generate what is missing, then pack and pin it; the path of the lock file. ValueError for what a user
    can fix.
    """
    out, given = arguments.out, Mixture.open(arguments.lock)
    out.mkdir(parents=True, exist_ok=True)
    with hold_lock(out / ".own_outputs.lock", f"another process writes {out}; wait, or give another --out"):
        made_by = {
            "model": model_identity(arguments.model),
            "mixture": given.fingerprint,
            **{
                key: getattr(arguments, key) for key in ("prompt_tokens", "new_tokens", "temperature", "seed")
            },
            "conversations": list(arguments.conversations) or None,
        }
        check_same_outputs(out / "outputs.json", made_by)
        generate(arguments, given, out / OUTPUTS)
        if not (tokenizer := shards.tokenizer_files(folder := arguments.lock.parent)):
            raise ValueError(f"{folder} has no tokenizer beside its lock file; prepare the data again")
        for path in tokenizer:
            if not (copy := out / path.name).exists() or not copy.samefile(path):
                shutil.copyfile(path, copy)
        seq_len = arguments.seq_len or given.seq_len
        rules = Rules(seq_len, arguments.seed, round(arguments.holdout * 10_000), cut_long=True)
        lines = read_lines(out / OUTPUTS)[: arguments.prompts]
        kept = {each.key: each for line in lines if (each := as_conversation(line, seq_len)) is not None}
        ordered = [kept[key] for key in sorted(kept)]
        counts = {"read": len(lines), "kept": len(ordered)}
        made = facts_of(out / SOURCE, rules, facts(tokenizer[0]) | made_by)
        write_source(out / SOURCE, made, ordered, counts, rules)
        return mixture.pin(
            out, SOURCE, {SOURCE: 1}, arguments.seed, seq_len, arguments.epoch_cap, mixture.CONVERSATIONS
        )


def model_identity(model: Path) -> list[str]:
    """Hashes of a folder's weights, or of a file."""
    files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model} holds no *.safetensors; give the folder that tools.export_hf wrote")
    return [file_sha256(path) for path in files]


def check_same_outputs(path: Path, made_by: dict[str, Any]) -> None:
    """ValueError where the outputs in the folder are another model's, or of other prompts or rules."""
    if not path.exists():
        path.write_text(json.dumps(made_by, indent=2) + "\n")
    before = json.loads(path.read_text())
    if different := [name for name in made_by if before.get(name) != made_by[name]]:
        raise ValueError(
            f"{path.parent} holds outputs made with another {', '.join(different)}; give another --out, or remove it"
        )


def prompts_of(given: Mixture, prompt_tokens: int) -> Iterator[list[int]]:
    """Beginnings of the mixture's texts, in its order, without end."""
    for number in itertools.count():
        window = given.sequences(number, 1)[0][0, :-1]
        if not given.packed:
            yield window[:prompt_tokens].tolist()
            continue
        flags = given.flags(number, 1)[0, :-1]
        begins = np.flatnonzero(flags & BEGINS)[1:]
        for text, marks in zip(np.split(window, begins), np.split(flags & TRAINED > 0, begins), strict=True):
            if marks.any() and (first := int(marks.argmax())) <= prompt_tokens:
                yield text[:first].tolist()


def first_messages(arguments: Arguments, encoder: PromptEncoder) -> Iterator[list[int]]:
    """What comes before the first reply of each of `arguments.conversations` that has any."""
    for row in itertools.chain.from_iterable(map(rows, arguments.conversations)):
        try:
            asked = list(itertools.takewhile(lambda message: message["role"] != ASSISTANT, messages(row)))
            prompt = encoder.conversation(asked)
        except (ChatError, KeyError, TypeError):  # no messages, or none that the template takes
            continue
        if asked and len(prompt) <= arguments.prompt_tokens:
            yield prompt


def all_prompts(arguments: Arguments, given: Mixture, engine: Engine) -> Iterator[list[int]]:
    """Of the mixture, and of the conversations in turn with them."""
    texts = prompts_of(given, arguments.prompt_tokens)
    if not arguments.conversations:
        return texts
    if engine.tokenizer is None:
        raise ValueError(f"--conversations: {arguments.model} has no tokenizer.json")
    asked = first_messages(arguments, PromptEncoder(engine.tokenizer, engine.tokenizer_config))
    return itertools.chain.from_iterable(zip(texts, asked, strict=False))


def generate(arguments: Arguments, given: Mixture, path: Path) -> None:
    """Append a line for each prompt that has none yet."""
    lines = read_lines(path)
    done = len(lines)
    if done and not path.read_bytes().endswith(b"\n"):  # killed in the middle of a line
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done >= arguments.prompts:
        return
    with (
        Engine.from_pretrained(arguments.model, device="auto", dtype=arguments.dtype) as engine,
        path.open("a") as file,
    ):
        prompts = itertools.islice(all_prompts(arguments, given, engine), done, arguments.prompts)
        while group := list(itertools.islice(prompts, arguments.at_a_time)):
            options = {"max_new_tokens": arguments.new_tokens, "temperature": arguments.temperature}
            answers = engine.generate_batch(group, **options, seed=arguments.seed + done)
            for prompt, answer in zip(group, answers, strict=True):
                row = {"number": done, "prompt_tokens": len(prompt), "ids": [*prompt, *answer]}
                file.write(json.dumps(row) + "\n")
                done += 1
            file.flush()
            print(f"{done:,} of {arguments.prompts:,} prompts", file=sys.stderr, flush=True)


def as_conversation(row: dict[str, Any], longest: int) -> Conversation | None:
    """A line as a text of a packed source, cut to `longest` tokens; None where nothing follows the prompt."""
    ids = np.array(row["ids"][:longest], dtype=np.uint32)
    if len(ids) <= row["prompt_tokens"]:
        return None
    trained = np.arange(len(ids)) >= row["prompt_tokens"]
    return Conversation(xxhash.xxh3_128_intdigest(ids.tobytes()), ids, trained)


if __name__ == "__main__":
    main()
