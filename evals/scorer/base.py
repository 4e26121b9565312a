"""What every evaluation asks of a model: scores of given ids, and text after a prompt."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

import numpy as np

from records.command import Count, Positive, check_ranges
from records.evals import optional
from records.files import read_json

Message = dict[str, str]  # {"role", "content"}
AnyPrompt = str | Sequence[int] | Sequence[Message]  # text, ids, or the messages of a chat

Item = TypeVar("Item")
Kind = Literal["auto", "engine", "transformers"]


@dataclass(frozen=True)
class Answerer:
    """What answers: the model folder in this process, or an OpenAI-compatible server if --base-url is given."""

    backend: Kind = "auto"
    """library that runs the model; auto: Transformers if a GPU is visible, else the engine for a Laneformer"""
    device: str = "auto"
    """device that runs the model: auto, cpu, cuda (the first visible GPU) or cuda:1; engine: also a list of GPUs"""
    dtype: str = "auto"
    """type of the engine's weights: auto (that of the folder), fp32, bf16, fp16, int8, int4"""
    max_length: Annotated[Count | None, optional("INT", "that of its config.json")] = None
    """context of the model in tokens"""
    base_url: Annotated[str | None, optional("URL", "the model runs here")] = None
    """OpenAI-compatible server that runs the model instead, such as http://127.0.0.1:8000/v1"""
    model: Annotated[str | None, optional("NAME", "the name of the model folder")] = None
    """name of the model at the server of --base-url"""
    concurrency: Count = 4
    """number of concurrent requests to the server of --base-url"""
    timeout_s: Positive = 600.0
    """timeout of one request to the server of --base-url, in seconds"""

    def __post_init__(self) -> None:
        check_ranges(Answerer, vars(self))


class Prompt(NamedTuple):
    """Token ids; those from `start` on, if any, are scored, each given all before it."""

    ids: list[int]
    start: int


class Scores(NamedTuple):
    """Scores of ids[start:]: logprobs float64 (n,) in nats; greedy bool (n,), True where the
    id is the argmax.
    """

    logprobs: np.ndarray
    greedy: np.ndarray


NOTHING = Scores(np.zeros(0), np.zeros(0, dtype=bool))


class Answer(NamedTuple):
    """Generated text; finish: "stop" (end of text or a stop string, which is cut off) or "length"."""

    text: str
    finish: str


class Encoder:
    """The tokenizer.json of a folder, read as the engine reads it.

    Attributes:
        bos_id: first id of a prompt; None without BOS and EOS.
    """

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{path} is missing; evaluations of text need the tokenizer: export the model with it"
            )
        self.folder = folder
        self._tokenizer = Tokenizer.from_file(str(path))
        config = read_config(folder)
        eos = config.get("eos_token_id")
        bos_id = config.get("bos_token_id")
        self.eos_id: int | None = eos[0] if isinstance(eos, list) else eos
        # GPT-2 has no BOS: EOS begins its texts
        self.bos_id: int | None = self.eos_id if bos_id is None else bos_id

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Encode a text; with `special_tokens` also those that the tokenizer adds around it."""
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, on several cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def prompt_ids(self, prompt: AnyPrompt) -> list[int]:
        """Return the ids of a text, of ids, or of messages in the folder's chat template."""
        if isinstance(prompt, str):
            return self.encode(prompt, special_tokens=True)
        if not prompt or not isinstance(prompt[0], dict):
            return list(cast(Sequence[int], prompt))
        if not (tokenizer := load_tokenizer(self.folder)).chat_template:
            raise ValueError(
                f"{self.folder} has no chat template; ask with a text (evals.code: --prompt completion)"
            )
        return self.encode(
            tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        )

    def text_after(self, before: Sequence[int], new: Sequence[int]) -> str:
        """Decode new ids behind others, as the engine streams them."""
        from laneformer.engine.text import TextStream

        text = TextStream(self._tokenizer, before)
        return "".join([*map(text.push, new), text.finish()])


class Scorer(Encoder):
    """A model that can be asked.

    Attributes:
        max_length: context in tokens.
        max_scored_ids: most ids of a prompt with what is scored. The last id is only predicted, so a
            model in this process takes max_length + 1; a server needs room to generate a token.
        parallel: requests that are answered at a time.
        reused_tokens: of prompts, whose keys and values an earlier one left; None: unknown.
    """

    backend: str
    device: str
    dtype: str | None
    max_length: int
    max_scored_ids: int
    parallel: int
    reused_tokens: int | None = None

    def score(self, items: Iterable[Sequence[Prompt]]) -> Iterator[list[Scores]]:
        """Score every prompt, item by item; prompts of one item share what they can."""
        raise NotImplementedError

    def generate(
        self, prompt: AnyPrompt, max_new_tokens: int, stops: Sequence[str] = (), **sampling: Any
    ) -> Answer:
        """Generate the text after a prompt.

        Args:
            sampling: temperature (0, the default, is greedy), top_p, top_k, seed.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free the model."""

    def rolling(self, ids: Sequence[int]) -> float:
        """Return log p of a whole text in nats: every id once, after BOS."""
        if self.bos_id is None:
            raise ValueError(
                f"{self.folder} has neither BOS nor EOS, which a text without context begins with"
            )
        sequence = [self.bos_id, *ids]
        room = self.max_scored_ids - 1
        # disjoint windows, each with all context that fits
        windows = []
        for begin in range(1, len(sequence), room):
            end = min(begin + room, len(sequence))
            first = max(0, end - room - 1)
            windows.append([Prompt(sequence[first:end], begin - first)])
        return math.fsum(float(scores.logprobs.sum()) for (scores,) in self.score(windows))

    def check_prompt(self, prompt: Prompt) -> Prompt:
        if not 1 <= prompt.start <= len(prompt.ids) <= self.max_scored_ids:
            raise ValueError(
                f"start = {prompt.start} of {len(prompt.ids)} ids: 1 <= start <= ids <= {self.max_scored_ids} "
                "is required"
            )
        return prompt

    def room(self, ids: Sequence[int], max_new_tokens: int) -> int:
        """Return how many new tokens fit behind a prompt, at most max_new_tokens; ValueError if none."""
        if (room := min(max_new_tokens, self.max_length - len(ids))) < 1:
            raise ValueError(
                f"a prompt of {len(ids)} tokens leaves no room for an answer in a context of {self.max_length}; "
                "evaluate a model with a longer context"
            )
        return room


def score_each(
    scorer: Scorer, items: Iterable[Item], prompts_of: Callable[[Item], Sequence[Prompt]]
) -> Iterator[tuple[Item, list[Scores]]]:
    # items are taken as the scorer asks for them
    items, to_ask = itertools.tee(items)
    return zip(items, scorer.score(map(prompts_of, to_ask)), strict=True)


@functools.lru_cache(1)
def load_tokenizer(folder: Path) -> Any:
    """Open a folder's tokenizer in Transformers, which knows its chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if (config := read_json(path)) is None:
        raise ValueError(
            f"{path} does not exist; pass a Hugging Face model folder, such as runs/demo/hf"
        )
    return config
