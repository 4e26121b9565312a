"""The token sequences of an item, in one of two protocols that give different scores.

`nanochat`: rows shuffled with seed 1337; each draws its few-shot examples with its own seed; whole prompts are encoded.
`dclm` (llm-foundry): rows in file order; one generator draws all examples; examples, context and answer are encoded
separately.

In both, a prompt that is too long is truncated from the left.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from evals.core.tasks import Row, Task, TaskType
from evals.scorer import Encoder, Prompt, common_prefix

Protocol = Literal["nanochat", "dclm"]
FEWSHOT_SEED = 1234
ORDER_SEED = 1337


class Unscorable(ValueError):
    """An item whose answer exceeds the context, or with too few examples."""


@dataclass(frozen=True)
class Item:
    """One prompt an option and the right one's index, or a single prompt."""

    prompts: list[Prompt]
    gold: int
    group: str = ""


def items(
    task: Task,
    rows: Sequence[Row],
    protocol: Protocol,
    encoder: Encoder,
    max_length: int,
    most: int | None = None,
) -> Iterator[Item]:
    """Yield the items of a task, at most `most`; Unscorable if an answer exceeds max_length tokens."""
    of_protocol = make_nanochat_items if protocol == "nanochat" else make_dclm_items
    return of_protocol(task, rows, encoder, max_length, most)


def space_evenly(count: int, most: int | None) -> set[int]:
    size = count if most is None else min(most, count)
    return {i * count // size for i in range(size)}


def list_options(task: Task, row: Row) -> list[tuple[str, str]]:
    """Return (context, answer) of each option; a language_modeling row has one."""
    if task.type == "multiple_choice":
        return [(row["query"], choice) for choice in row["choices"]]
    if task.type == "schema":
        return [(context, row["continuation"]) for context in row["context_options"]]
    return [(row["context"].strip(), row["continuation"])]


def write_examples(task: Task, examples: Sequence[Row]) -> list[str]:
    rights = [list_options(task, example)[example.get("gold", 0)] for example in examples]
    return [f"{context}{task.delimiter}{answer}" for context, answer in rights]


# --- nanochat


def order_rows(count: int, most: int | None) -> list[int]:
    """Return the indices of the rows to score, shuffled as nanochat does."""
    order = list(range(count))
    random.Random(ORDER_SEED).shuffle(order)
    return order[:most]


def draw_nanochat_examples(index: int, count: int, shots: int) -> list[int]:
    """Draw the few-shot examples of row `index` among the `count` rows that are scored."""
    if shots == 0:
        return []
    if shots > count - 1:
        raise Unscorable(
            f"each row needs {shots} other rows as examples, but only {count} rows are asked"
        )
    others = [i for i in range(count) if i != index]
    return random.Random(FEWSHOT_SEED + index).sample(others, shots)


def make_nanochat_items(
    task: Task, rows: Sequence[Row], encoder: Encoder, max_length: int, most: int | None
) -> Iterator[Item]:
    if encoder.bos_id is None:
        raise ValueError(
            "protocol nanochat begins each prompt with BOS or EOS, but the tokenizer has neither"
        )
    chosen = [rows[i] for i in order_rows(len(rows), most)]
    for index, row in enumerate(chosen):
        examples = [chosen[i] for i in draw_nanochat_examples(index, len(chosen), task.shots)]
        texts = write_nanochat_texts(task, row, examples)
        sequences = [[encoder.bos_id, *ids] for ids in encoder.encode_each(texts)]
        prompts = locate_answers(sequences, task.type)
        yield Item([crop_prompt(prompt, max_length) for prompt in prompts], row.get("gold", 0))


def write_nanochat_texts(task: Task, row: Row, examples: Sequence[Row]) -> list[str]:
    """Write the prompt of each option; of a language_modeling task without and with the answer."""
    examples_text = "".join(f"{example}\n\n" for example in write_examples(task, examples))
    texts = [
        f"{examples_text}{context}{task.delimiter}{answer}"
        for context, answer in list_options(task, row)
    ]
    if task.type == "language_modeling":
        # the space before the answer belongs to the answer's first token
        texts.insert(0, texts[0].removesuffix(row["continuation"]).strip())
    return texts


def locate_answers(sequences: list[list[int]], type_: TaskType) -> list[Prompt]:
    """Locate the answer in each prompt: where they differ, what all end with, or what is added to the first."""
    if type_ == "language_modeling":
        # an answer that changes the tokens before it, which nanochat refuses, begins at the first
        # change
        context_ids, whole_ids = sequences
        return [Prompt(whole_ids, min(common_prefix(context_ids, whole_ids), len(whole_ids) - 1))]
    if type_ == "multiple_choice":
        start = min(common_prefix(sequences[0], other) for other in sequences)
        return [Prompt(ids, start) for ids in sequences]
    # schema: the contexts differ and the answer is one, so it is the ids that all end with, found as
    # the common prefix of the reversed sequences
    common_suffix = min(common_prefix(sequences[0][::-1], other[::-1]) for other in sequences)
    return [Prompt(ids, len(ids) - common_suffix) for ids in sequences]


def crop_prompt(prompt: Prompt, max_length: int) -> Prompt:
    """Keep the last `max_length` ids of a prompt; Unscorable if its answer does not fit."""
    cut = max(0, len(prompt.ids) - max_length)
    if prompt.start - cut < 1:
        raise Unscorable(
            f"an answer of {len(prompt.ids) - prompt.start} tokens does not fit into {max_length}"
        )
    return Prompt(prompt.ids[cut:], prompt.start - cut)


# --- dclm


def make_dclm_items(
    task: Task, rows: Sequence[Row], encoder: Encoder, max_length: int, most: int | None
) -> Iterator[Item]:
    # GPT-2's tokens include the leading space; SentencePiece adds it
    needs_space = len(encoder.encode(" a")) == 1
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row.get("category", "")) if task.by_category else "", []).append(row)
    for number, (group, members) in enumerate(groups.items()):
        # every group has its part of `most`: (most + number) // groups sum to `most` over all groups,
        # and the last ones, which are one larger, take the remainder
        chosen = space_evenly(
            len(members), None if most is None else (most + number) // len(groups)
        )
        for index, examples in enumerate(draw_dclm_examples(len(members), task.shots)):
            if index in chosen:
                shots = [members[i] for i in examples]
                prompts = make_dclm_prompts(
                    task, members[index], shots, encoder, needs_space, max_length
                )
                yield Item(prompts, members[index].get("gold", 0), group)


def draw_dclm_examples(count: int, shots: int) -> Iterator[set[int]]:
    """Yield the few-shot examples of rows 0, 1, ..."""
    generator = random.Random(FEWSHOT_SEED)
    for index in range(count):
        chosen = set(generator.sample(range(count), min(count - 1, shots)))
        if index in chosen:
            chosen.remove(index)
            other = index
            while other in chosen or other == index:
                other = generator.choice(range(count))
            chosen.add(other)
        # llm-foundry shows them in the set's iteration order
        yield chosen


def make_dclm_prompts(
    task: Task,
    row: Row,
    examples: Sequence[Row],
    encoder: Encoder,
    needs_space: bool,
    max_length: int,
) -> list[Prompt]:
    """Encode examples, context and answer of each option separately."""
    stripped = [
        {k: v.strip() if isinstance(v, str) else v for k, v in r.items()} for r in (row, *examples)
    ]
    examples_text = "\n".join(write_examples(task, stripped[1:]))
    preamble = encoder.encode(examples_text, special_tokens=True)
    if len(preamble) > 1 and preamble[-1] == encoder.eos_id:
        preamble = preamble[:-1]
    prompts = []
    for context, answer in list_options(task, stripped[0]):
        if task.type == "schema":
            text = context + (task.delimiter.rstrip() if examples_text else "")
        else:
            text = f"{context}{task.delimiter}".rstrip()
        head = preamble + encoder.encode("\n" * bool(examples_text) + text)
        tail = encoder.encode(
            f" {answer}" if needs_space and not answer.startswith(" ") else answer
        )
        prompts.append(crop_prompt(Prompt(head + tail, len(head)), max_length))
    return prompts
