"""Passes of several columns on the emulator: every logit, in any company; batches and drafts change no token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda import decoding
from laneformer.engine.cuda.decoding import Decoding, draft
from laneformer.engine.cuda.geometry import H200, Machine
from laneformer.engine.cuda.launches import sequences_in
from laneformer.engine.cuda.passes import PassDecoder
from laneformer.engine.cuda.planning import plan_builds
from laneformer.engine.decoder import Request, Sampling
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.harness import small_config
from tests.laneformer.cuda.reference import expected, kept_at
from tests.laneformer.cuda.stand_ins import EmulatedPasses
from tests.proofs import KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING),
]
GREEDY = Sampling(top_p=1.0)


def text(count: int, seed: int = 1) -> list[int]:
    return torch.randint(96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_by_one(passes: EmulatedPasses, ids: list[int]) -> torch.Tensor:
    return torch.cat([passes.logits([(token, position, 0)]) for position, token in enumerate(ids)])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_logit(dtype: str, cuda_builds: Path) -> None:
    """Position after position, against float64 over the kernel's own keys and values."""
    passes, ids = EmulatedPasses(cuda_builds, 1, dtype=dtype), text(9)
    layers, rows = range(passes.config.num_hidden_layers), []
    kept: list[list[torch.Tensor]] = [[] for _ in layers]
    for position, token in enumerate(ids):
        rows.append(passes.logits([(token, position, 0)]))
        for layer in layers:
            kept[layer].append(kept_at(passes, layer, position))  # type: ignore[arg-type]
    pairs = [tuple(torch.stack(of_layer, 2)[:, None]) for of_layer in kept]
    right = expected(passes, ids, pairs)  # type: ignore[arg-type]
    assert (torch.cat(rows).double() - right.logits).abs().max() <= right.tolerance


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
    passes: PassDecoder, prompts: list[list[int]], sampling: list[Sampling], **options: Any
) -> list[Decoding]:
    pairs = zip(prompts, sampling, strict=True)
    made = [Decoding(Request(ids, 9, sampling=s, **options)) for ids, s in pairs]
    while not all(s.finished for s in made):
        passes.advance(made)
    return made


def test_batches_and_drafts_change_no_token(cuda_builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, drawn and filtered; prompts of different lengths, read in pieces beside those that decode."""
    prompts = [text(3), [5, 6, 7, 5, 6, 7, 5, 6], text(11, 4)]
    ways = [GREEDY, Sampling(7, 2.0, 1.0, 0.0, 0), Sampling(8, 0.7, 0.9, 0.01, 12)]
    alone = [
        decode(EmulatedPasses(cuda_builds, 1), [p], [w])[0].tokens for p, w in zip(prompts, ways, strict=True)
    ]
    five = EmulatedPasses(cuda_builds, 5)
    assert [s.tokens for s in decode(five, prompts, ways)] == alone
    five.passes, at = 0, {len(p): p + tokens for p, tokens in zip(prompts, alone, strict=True)}

    def oracle(ids: Sequence[int], most: int) -> list[int]:
        """What comes, but for the third."""
        text = next(text for length, text in at.items() if ids[:length] == text[:length])
        return [token if i != 2 else 95 - token for i, token in enumerate(text[len(ids) :][:most])]

    monkeypatch.setattr("laneformer.engine.cuda.decoding.draft", oracle)
    drafting = [decode(five, [p], [w], speculate=4)[0] for p, w in zip(prompts, ways, strict=True)]
    assert [s.tokens for s in drafting] == alone
    assert [s.accepted for s in drafting] == [6, 6, 6]
    assert all(s.proposed > s.accepted for s in drafting)
    assert five.passes <= sum(-(-len(p) // 5) + 3 for p in prompts), "9 tokens in 4 passes at most"


def test_columns_leave_memory_for_the_ring() -> None:
    """The 2b model: eight columns on an H200, fewer where the ring would be too small."""
    config = LaneformerConfig.from_flavor("2b")
    sizes = [plan_builds(config, "bf16", m)[-1].mma_columns for m in (H200, Machine(108, 163 << 10, 80))]
    assert sizes == [8, 4]
    geometry = plan_builds(config, "bf16", H200)[-1]
    assert [sequences_in(n << 30, geometry, bytes_) for n, bytes_ in ((7, 0), (141, None), (141, 2**30))] == [
        8,
        64,
        12,
    ]
    with pytest.raises(
        ValueError, match=r"passes of 8 columns need 6\.\d GB, 4\.4 of them for weights as tiles"
    ):
        sequences_in(5 << 30, geometry, None)
    with pytest.raises(ValueError, match=r"dtype = 'int8': passes of several columns .* have 16-bit weights"):
        plan_builds(config, "int8", H200)
    with pytest.raises(ValueError, match=r"head matrix of a lane, 52 x 64.*rows of 16"):
        plan_builds(small_config(vocab_size=104), "bf16", H200)


def test_drafts_follow_the_latest_earlier_place() -> None:
    assert draft([1, 2, 3, 9, 2, 3, 8, 2, 3], 2) == [8, 2]
    assert draft([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert draft([1, 2, 3, 4], 3) == []
    assert draft([1, 2, 1, 2], 0) == []


def test_pieces_and_slots_change_no_token(cuda_builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts read by PyTorch from the tiles, beside others, again, continued and scored."""
    monkeypatch.setattr(decoding, "IN_PASS_TOKENS", 3)
    monkeypatch.setattr(decoding, "PIECE_TOKENS", 5)
    five, prompts = EmulatedPasses(cuda_builds, 5, sequences=7), [text(15), text(15, 2), text(2)]
    alone = [decode(five, [prompt], [GREEDY], reuse_prefix=False)[0] for prompt in prompts]
    assert [s.passes for s in alone] == [3 + 9, 3 + 9, 9]
    beside = decode(five, prompts * 2, [GREEDY] * 6)
    assert [s.tokens for s in beside] == [s.tokens for s in alone] * 2
    assert sum(s.reused for s in beside) >= 4 * 14 + 2, "rings have forgotten no prompt's end"
    longer = prompts[0] + alone[0].tokens
    again = Decoding(Request(longer, 1))
    scored = Decoding(Request(longer, score_from=12, logprobs=1))
    kept = Decoding(Request(longer, score_from=1, logprobs=0, keep_logits=True, reuse_prefix=False))
    while not (again.finished and scored.finished and kept.finished):
        five.advance([again, scored, kept])
    assert again.reused >= 14
    logprobs = scored.scores.part(0, len(longer) - 12)[0]
    right = five.model(torch.tensor([longer]))[0].log_softmax(-1)
    plain = torch.cat(kept.logits).log_softmax(-1)
    off = (plain - right).abs().max()  # PyTorch in 16 bits, all positions
    assert off < 0.5
    targets = right[range(11, len(longer) - 1), longer[12:]]
    assert (torch.from_numpy(logprobs) - targets).abs().max() <= 2 * off
