"""The decode kernels on the emulator: every logit of every position, in any order of threads, cut in any way.

test_order.py shows that the checks here and in the emulator find planted faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from laneformer.engine.cuda.geometry import Machine
from laneformer.engine.cuda.planning import plan
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.harness import Emulated, small_config
from tests.laneformer.cuda.reference import expected, read_one_by_one
from tests.laneformer.cuda.shapes import SHAPES
from tests.proofs import KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING),
]


def text(emulated: Emulated, count: int) -> list[int]:
    return torch.randint(
        emulated.config.vocab_size, (count,), generator=torch.Generator().manual_seed(1)
    ).tolist()


def check(emulated: Emulated, count: int, seeds: range) -> None:
    """A text of `count` tokens against the reference, and in one launch in several orders of the threads."""
    ids = text(emulated, count)
    emulated.forget()
    logits, kept = read_one_by_one(emulated, ids)
    right = expected(emulated, ids, kept)
    off = float((logits.double() - right.logits).abs().max())
    assert off <= right.tolerance, f"off by {off}, tolerance {right.tolerance}"
    for layer, numbers in enumerate(kept):
        both = torch.cat(numbers)
        assert ((right.least[layer] <= both) & (both <= right.most[layer])).all(), (
            f"keys or values of layer {layer}"
        )
    for seed in seeds:  # the emulator checks the order of the words
        emulated.forget()
        _, at_once = emulated.read(ids, seed=seed)
        assert torch.equal(at_once, logits), f"seed {seed}"


@pytest.mark.parametrize("name", SHAPES)
def test_every_logit(name: str, cuda_builds: Path) -> None:
    check(SHAPES[name].emulated(cuda_builds), 11, range(3))


@pytest.mark.parametrize("name", ["delay 0", "late"])
def test_the_graph_gives_the_same_bits(name: str, cuda_builds: Path) -> None:
    """And so does each of its replays: the last tokens are its own."""
    persistent = SHAPES[name].emulated(cuda_builds)
    graph = SHAPES[name].emulated(cuda_builds, version="graph")
    ids, made = text(persistent, 6), []
    for emulated in (persistent, graph):
        emulated.forget()
        made.append(emulated.read(ids, 4))
    assert made[0][0] == made[1][0]
    assert torch.equal(made[0][1], made[1][1])


def test_exchanges_with_all_blocks_give_the_same_bits(plain: Emulated, cuda_builds: Path) -> None:
    wide = SHAPES["delay 1"].emulated(cuda_builds, wide_exchanges=True)
    ids = text(plain, 6)
    tokens, logits = plain.read(ids, 4)
    for seed in range(2):
        wide.forget()
        wide_tokens, wide_logits = wide.read(ids, 4, seed)
        assert wide_tokens == tokens
        assert torch.equal(wide_logits, logits)
    wide_tokens, wide_logits = wide.read(ids, 4)  # its count of exchanges goes on
    assert torch.equal(wide_logits, logits)


@pytest.fixture
def plain(cuda_builds: Path) -> Emulated:
    emulated = SHAPES["delay 1"].emulated(cuda_builds)
    emulated.forget()
    return emulated


def test_launches_can_be_cut_anywhere(plain: Emulated) -> None:
    """One launch of 12 tokens, three of 4; and the same memory reads a second text as if it were new."""
    ids = text(plain, 3)
    tokens, logits = plain.read(ids, 12)
    assert len(tokens) == 12
    plain.forget()
    pieces, rows = [], torch.full_like(logits, float("nan"))
    given, position = ids, 0
    for _ in range(3):
        made = plain.launch(plain.arguments(given, position, 4, logits=rows[position:]))
        position, given = position + len(given) + 3, made[-1:]
        pieces += made
    assert pieces == tokens
    assert torch.equal(rows, logits)
    assert plain.read(ids, 12, seed=7)[0] == tokens


def test_a_stop_id_ends_the_launch_in_all_blocks(cuda_builds: Path) -> None:
    """On both GPUs: the emulator's launch ends when every thread has ended."""
    two = SHAPES["at once"].emulated(cuda_builds)
    two.forget()
    ids = text(two, 2)
    tokens, _ = two.read(ids, 6)
    first = next(i for i in range(1, 6) if tokens[i] not in tokens[:i])
    absent = next(i for i in range(two.config.vocab_size) if i not in tokens)
    assert two.read(ids, 6, stops=[absent, tokens[first]])[0] == tokens[: first + 1]
    assert two.read(ids[:1] * 2, 1, stops=ids[:1])[0] != [], "a stop id in the prompt ends nothing"


def test_logits_that_are_no_numbers_choose_a_token(plain: Emulated) -> None:
    plain.memories[0].norms.fill_(float("nan"))
    tokens, logits = plain.read(text(plain, 2), 2)
    assert logits.isnan().all()
    assert tokens == [plain.config.vocab_size - 1] * 2


@pytest.mark.parametrize("prompt", [1, 3])
def test_a_wish_to_stop_ends_the_launch(plain: Emulated, prompt: int) -> None:
    """After the token under way: of a longer prompt that is none of the new ones."""
    ids = text(plain, prompt)
    logits = torch.full((prompt + 4, plain.config.vocab_size), float("nan"))
    arguments = plain.arguments(ids, 0, 5, logits=logits)
    plain.memories[0].cancel.fill_(1)
    made = plain.launch(arguments)
    assert len(made) == (1 if prompt == 1 else 0)
    assert logits[0].isfinite().all()
    assert logits[1:].isnan().all()


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"dtype": "fp32"}, r"dtype = 'fp32'.*use 'bf16' or 'fp16' or 'int8'"),
        ({}, {"dtype": "fp8"}, r"dtype = 'fp8'.*16 or 8 bits; use 'bf16' or 'fp16' or 'int8'"),
        ({"lm_head_type": "lane"}, {}, r"lm_head_type = 'lane'.*vocab_parallel.*use the CPU"),
        ({}, {"devices": 3}, r"3 devices cannot share 2 lanes evenly; use one of \[1, 2\]"),
        ({"num_attention_heads": 16}, {}, r"head dimension 4 .*multiple of 8.*use the CPU"),
        ({"vocab_size": 98}, {}, r"the head matrix of a lane, 49 x 64.*rows of 4; use the CPU"),
        ({"intermediate_size": 88}, {}, r"the down matrix of a lane, 64 x 44.*multiple of 8.*use the CPU"),
        ({}, {"blocks_per_lane": 5}, r"blocks_per_lane = 5 is outside 1 to 4 \(8 multiprocessors\)"),
        ({}, {"blocks_per_lane": 0}, r"blocks_per_lane = 0 is outside 1 to 4 \(8 multiprocessors\)"),
        ({}, {"warps": 0}, r"warps = 0 is outside 1 to 32"),
        ({}, {"warps": 33}, r"warps = 33 is outside 1 to 32"),
        ({}, {"chunk_bytes": 700}, r"chunk_bytes = 700 must be a .*multiple of 512"),
        ({}, {"chunk_bytes": 0}, r"chunk_bytes = 0 must be a .*multiple of 512"),
        ({}, {"machine": Machine(1, 2**16, 90)}, r"2 lanes need 2 multiprocessors, this GPU has 1; use more GPUs"),
        ({}, {"machine": Machine(8, 2000, 90)}, r"2000 bytes.*too few for a ring of two chunks.*use fewer warps"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(config: dict[str, Any], options: dict[str, Any], message: str) -> None:
    given = {"dtype": "bf16", "machine": Machine(8, 48 * 1024, 90), "warps": 2, **options}
    with pytest.raises(ValueError, match=message):
        plan(small_config(**config), given.pop("dtype"), given.pop("machine"), **given)
