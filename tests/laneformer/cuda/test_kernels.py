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
from laneformer.engine.cuda.structures import Column
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import GREEDY, EmulatedPasses
from tests.laneformer.cuda.harness import small_config
from tests.laneformer.cuda.reference import expected, read_one_by_one
from tests.laneformer.cuda.shapes import SHAPES
from tests.proofs import KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING),
]


def text(emulated: EmulatedPasses, count: int) -> list[int]:
    return torch.randint(
        emulated.config.vocab_size, (count,), generator=torch.Generator().manual_seed(1)
    ).tolist()


def check(emulated: EmulatedPasses, count: int, seeds: range) -> None:
    """A text of `count` tokens against the reference; in several columns, and orders of the threads, the same bits;
    and the passes that follow unasked make the tokens of single ones.
    """
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
    right_tokens = emulated.picks([(ids[-1], count - 1, 0)])[0]
    while len(right_tokens) < 4:
        right_tokens += emulated.picks([(right_tokens[-1], count + len(right_tokens) - 1, 0)])[0]
    for seed in seeds:  # the emulator checks the order of the words
        emulated.forget()
        tokens, together = emulated.decode(ids, 4, seed)
        assert torch.equal(together, logits), f"seed {seed}"
        assert tokens == right_tokens, f"seed {seed}"


@pytest.mark.parametrize("name", SHAPES)
def test_every_logit(name: str, cuda_builds: Path) -> None:
    check(SHAPES[name].emulated(cuda_builds), 11, range(3))


@pytest.mark.parametrize("name", ["delay 0", "late", "flushed"])
def test_the_graph_gives_the_same_bits(name: str, cuda_builds: Path) -> None:
    """And so does each of its replays: the last tokens are its own. A column that has ended stands still."""
    passes = SHAPES[name].emulated(cuda_builds)
    graph = SHAPES[name].emulated(cuda_builds, version="graph")
    ids = text(passes, 6)
    tokens, logits = passes.decode(ids, 5)
    assert graph.decode(ids, 5)[0] == tokens
    assert torch.equal(graph.decode(ids)[1], logits)
    stop = next(i for i in range(1, 5) if tokens[i] not in tokens[:i])
    assert graph.decode(ids, 5, stops=[tokens[stop]])[0] == tokens[: stop + 1]
    both = [Column(tokens[0], 6, 0, sampling=GREEDY), Column(tokens[0], 0, 1, left=2, sampling=GREEDY)]
    rows, right = graph.run(both, 2), passes.run(both, 2)
    assert rows == right
    assert rows[2][1] == -1


def test_exchanges_with_all_blocks_give_the_same_bits(plain: EmulatedPasses, cuda_builds: Path) -> None:
    wide = SHAPES["delay 1"].emulated(cuda_builds, wide_exchanges=True, columns=1)
    ids = text(plain, 6)
    tokens, logits = plain.decode(ids, 4)
    for seed in range(2):
        wide.forget()
        wide_tokens, wide_logits = wide.decode(ids, 4, seed)
        assert wide_tokens == tokens
        assert torch.equal(wide_logits, logits)
    wide_tokens, wide_logits = wide.decode(ids, 4)  # its count of exchanges goes on
    assert torch.equal(wide_logits, logits)


@pytest.fixture
def plain(cuda_builds: Path) -> EmulatedPasses:
    return SHAPES["delay 1"].emulated(cuda_builds)


def test_launches_can_be_cut_anywhere(plain: EmulatedPasses) -> None:
    """One launch of 12 passes, three of 4; and the same memory reads a second text as if it were new."""
    ids = text(plain, 3)
    tokens, _ = plain.decode(ids, 13)
    assert len(tokens) == 13
    plain.forget()
    pieces, _ = plain.decode(ids)
    for _ in range(3):
        last = Column(pieces[-1], 2 + len(pieces), 0, sampling=GREEDY)
        pieces += [row[0] for row in plain.run([last], 3)]
    assert pieces == tokens
    assert plain.decode(ids, 13, seed=7)[0] == tokens


def test_a_stop_id_ends_the_launch_in_all_blocks(cuda_builds: Path) -> None:
    """On both GPUs: the emulator's launch ends when every thread has ended."""
    two = SHAPES["at once"].emulated(cuda_builds)
    ids = text(two, 2)
    tokens, _ = two.decode(ids, 6)
    first = next(i for i in range(1, 6) if tokens[i] not in tokens[:i])
    absent = next(i for i in range(two.config.vocab_size) if i not in tokens)
    assert two.decode(ids, 6, stops=[absent, tokens[first]])[0] == tokens[: first + 1]


def test_logits_that_are_no_numbers_choose_a_token(plain: EmulatedPasses) -> None:
    plain.memories[0].norms.fill_(float("nan"))
    tokens, logits = plain.decode(text(plain, 2), 2)
    assert logits.isnan().all()
    assert tokens == [plain.config.vocab_size - 1] * 2


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"dtype": "fp32"}, r"dtype = 'fp32'.*use 'bf16' or 'fp16' or 'int8'"),
        ({}, {"dtype": "fp8"}, r"dtype = 'fp8'.*16 or 8 bits; use 'bf16' or 'fp16' or 'int8'"),
        ({"lm_head_type": "lane"}, {}, r"lm_head_type = 'lane'.*vocab_parallel.*use the CPU"),
        ({}, {"devices": 3}, r"3 devices cannot share 2 lanes evenly; use one of \[1, 2\]"),
        ({"num_attention_heads": 16}, {}, r"head dimension 4 .*multiple of 8.*use the CPU"),
        ({"intermediate_size": 80}, {}, r"the down matrix of a lane, 64 x 40.*multiple of 16.*use the CPU"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 80}, {},
         r"the qkv matrix of a lane, 120 x 80.*rows of 16; use the CPU"),
        ({}, {"columns": 9}, r"columns = 9 is outside 1 to 8"),
        ({}, {"columns": 2, "wide_exchanges": True}, "an ablation of one column; use columns = 1"),
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
