"""Passes of several columns on the emulator: every logit, in any company; batches and drafts change no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda import executor as executor_module
from laneformer.engine.cuda.executor import CudaExecutor
from laneformer.engine.cuda.geometry import H200, Machine
from laneformer.engine.cuda.passes import PassDecoder, sequences_in
from laneformer.engine.cuda.planning import plan_builds
from laneformer.engine.decoder import Collected, Request, Sampling, Unanswered
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import GREEDY, EmulatedPasses
from tests.laneformer.cuda.reference import expected, read_one_by_one
from tests.laneformer.cuda.stand_ins import answers
from tests.proofs import KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING),
]


def text(count: int, seed: int = 1) -> list[int]:
    return torch.randint(96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_by_one(passes: EmulatedPasses, ids: list[int]) -> torch.Tensor:
    return torch.cat([passes.logits([(token, position, 0)]) for position, token in enumerate(ids)])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8"])
def test_every_logit(dtype: str, cuda_builds: Path) -> None:
    """Position after position, against float64 over the kernel's own keys and values."""
    passes, ids = EmulatedPasses(cuda_builds, 1, dtype=dtype), text(9)
    logits, kept = read_one_by_one(passes, ids)
    right = expected(passes, ids, kept)
    assert (logits.double() - right.logits).abs().max() <= right.tolerance


def test_columns_do_not_see_each_other(cuda_builds: Path) -> None:
    """Alone, as a prompt in pieces, and between other sequences: the same bits, beyond the windows
    of 6 as well.
    """
    ids, other = text(13), text(13, 2)
    right = one_by_one(EmulatedPasses(cuda_builds, 1), ids)
    five = EmulatedPasses(cuda_builds, 5, seed=3)
    pieces = [
        five.logits([(ids[i], i, 2) for i in range(a, b)]) for a, b in ((0, 5), (5, 6), (6, 10), (10, 13))
    ]
    assert torch.equal(torch.cat(pieces), right)
    among = EmulatedPasses(cuda_builds, 5, seed=9)
    rows = []
    for i in range(0, 12, 2):
        own, beside = (
            [(ids[j], j, 1) for j in (i, i + 1)],
            [(other[j], j, s) for j in (i, i + 1) for s in (0, 4)],
        )
        rows.append(among.logits([*beside[:1], *own, *beside[2:4]])[1:3])
    assert torch.equal(torch.cat(rows), right[:12])


def test_two_gpus(cuda_builds: Path) -> None:
    two, one = EmulatedPasses(cuda_builds, 3, devices=2, blocks_per_lane=4), EmulatedPasses(cuda_builds, 1)
    ids = text(6)
    assert torch.equal(two.logits([(ids[i], i, 0) for i in range(3)]), one_by_one(one, ids[:3]))


def decode(
    executor: CudaExecutor, prompts: list[list[int]], sampling: list[Sampling], **options: Any
) -> list[Collected]:
    pairs = zip(prompts, sampling, strict=True)
    return answers(executor, [Request(ids, 9, sampling=s, **options) for ids, s in pairs])


WAYS = [GREEDY, Sampling(7, 2.0, 1.0, 0.0, 0), Sampling(8, 0.7, 0.9, 0.01, 12)]


def test_batches_and_drafts_change_no_token(cuda_builds: Path) -> None:
    """Greedy, drawn and filtered; prompts of different lengths, read in pieces beside those that decode."""
    prompts = [text(3), [5, 6, 7, 5, 6, 7, 5, 6], text(11, 4)]
    single = EmulatedPasses(cuda_builds, 1)
    single.unread = 64
    one = CudaExecutor(single)
    alone = [decode(one, [p], [w])[0].tokens for p, w in zip(prompts, WAYS, strict=True)]
    five = EmulatedPasses(cuda_builds, 5)
    executor = CudaExecutor(five)
    assert [news.tokens for news in decode(executor, prompts, WAYS)] == alone
    assert five.passes <= 5 + 9, "22 ids of prompts, then nine tokens of all three"
    executor.schedule.fix_cost(0.02)
    proposed = accepted = 0
    for prompt, way, tokens in zip(prompts, WAYS, alone, strict=True):
        prediction = [*prompt, *tokens[:2], 95 - tokens[2], *tokens[3:]]
        drafting = decode(executor, [prompt], [way], speculate=4, prediction=prediction)[0]
        assert drafting.tokens == tokens
        proposed += drafting.whole.statistics["proposed_tokens"]
        accepted += drafting.whole.statistics["accepted_tokens"]
    assert proposed > accepted > 6


def test_each_option_as_alone(cuda_builds: Path) -> None:
    """What the kernel draws beside what the schedule draws from rows of logits, with drafts among both."""
    ids = [70, 70, 22, 70, 70, 22, 62, 70, 70, 22]
    asked = [
        Request(ids, 9, speculate=3),
        Request(ids, 9, speculate=3, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2),
        Request(text(4), 6, sampling=WAYS[2], logit_bias=[(7, 3.0)], stop_ids=[70], min_new_tokens=5),
        Request(text(7), 8, sampling=WAYS[1], logprobs=0),
        Request(text(9), 8, sampling=WAYS[2], stop_ids=range(40)),
    ]
    executor = CudaExecutor(EmulatedPasses(cuda_builds, 5))
    executor.schedule.fix_cost(0.02)
    alone = [answers(executor, [replace(r, reuse_prefix=False)])[0] for r in asked]
    together = answers(executor, asked)
    for one, other in zip(alone, together, strict=True):
        assert other.tokens == one.tokens
        for ours, theirs in zip(other.scores or (), one.scores or (), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert together[1].tokens != together[0].tokens


def test_who_ends_early_holds_nobody_up(cuda_builds: Path) -> None:
    """Passes that follow unasked: a stop id and a limit end one column each, and the others go on."""
    five = EmulatedPasses(cuda_builds, 5)
    executor, prompts = CudaExecutor(five), [text(3), text(5, 2), text(4, 3)]
    alone = [answers(executor, [Request(ids, 12, reuse_prefix=False)])[0].tokens for ids in prompts]
    asked = [
        Request(prompts[0], 12, stop_ids=[alone[0][4]]),
        Request(prompts[1], 12),
        Request(prompts[2], 7),
    ]
    together = [news.tokens for news in answers(executor, asked)]
    assert together == [alone[0][: alone[0].index(alone[0][4]) + 1], alone[1], alone[2][:7]]
    continued = [*prompts[0], *together[0]]
    news = answers(executor, [Request(continued, 2)])[0]
    assert news.tokens == alone[0][len(together[0]) :][:2]
    assert news.whole.statistics["reused_tokens"] == len(continued) - 1


def test_columns_leave_memory_for_the_ring() -> None:
    """The 2b model: eight columns on an H200, fewer where the ring would be too small."""
    config = LaneformerConfig.from_flavor("2b")
    sizes = [plan_builds(config, "bf16", m)[-1].columns for m in (H200, Machine(108, 163 << 10, 80))]
    assert sizes == [8, 4]
    geometry = plan_builds(config, "bf16", H200)[-1]
    assert [sequences_in(n << 30, geometry, bytes_) for n, bytes_ in ((7, 0), (141, None), (141, 2**30))] == [
        8,
        64,
        12,
    ]
    with pytest.raises(ValueError, match=r"a pass of 8 columns needs 6\.\d GB, 4\.4 of them for weights"):
        sequences_in(5 << 30, geometry, None)
    assert [g.chunks for g in plan_builds(config, "int8", H200)] == [
        g.chunks for g in plan_builds(config, "bf16", H200)
    ]


def test_pieces_and_caches_change_no_token(cuda_builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts read by PyTorch from the tiles, beside others, again, continued and scored."""
    monkeypatch.setattr(executor_module, "PIECE_TOKENS", 5)
    five, prompts = EmulatedPasses(cuda_builds, 5, sequences=7), [text(15), text(15, 2), text(2)]
    five.unread = 3
    executor = CudaExecutor(five)
    alone = [decode(executor, [prompt], [GREEDY], reuse_prefix=False)[0] for prompt in prompts]
    assert [news.whole.statistics["passes"] for news in alone] == [3 + 9, 3 + 9, 9]
    beside = decode(executor, prompts * 2, [GREEDY] * 6)
    assert [news.tokens for news in beside] == [news.tokens for news in alone] * 2
    reused = sum(news.whole.statistics["reused_tokens"] for news in beside)
    assert reused >= 4 * 14 + 2, "rings have forgotten no prompt's end"
    longer = prompts[0] + alone[0].tokens
    again, scored, kept = answers(executor, [
        Request(longer, 1),
        Request(longer, score_from=12, logprobs=1),
        Request(longer, score_from=1, logprobs=0, keep_logits=True, reuse_prefix=False),
    ])  # fmt: skip
    assert again.whole.statistics["reused_tokens"] >= 14
    assert scored.scores is not None
    assert kept.whole.logits is not None
    right = five.model(torch.tensor([longer]))[0].log_softmax(-1)
    plain = torch.from_numpy(kept.whole.logits).view(right.shape).log_softmax(-1)
    off = (plain - right).abs().max()  # PyTorch in 16 bits, all positions
    assert off < 0.5
    targets = right[range(11, len(longer) - 1), longer[12:]]
    assert (torch.from_numpy(scored.scores[0]) - targets).abs().max() <= 2 * off


def test_a_launch_that_never_ends_is_given_up() -> None:
    """A kernel that waits for its weights does not look at the clock; the host does."""
    stuck: Any = object.__new__(PassDecoder)
    stuck.limit_s, stuck.late_s, stuck._streams = 0.05, 0.0, [SimpleNamespace(query=lambda: False)]
    with pytest.raises(Unanswered, match=r"the pass kernel has not ended within 0\.07 s"):
        list(stuck._until_done(1))
