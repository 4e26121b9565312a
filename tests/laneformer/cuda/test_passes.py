"""Passes of several columns on the emulator: every logit, in any company; batches and drafts change no token."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda.compile import INCLUDES, source_of
from laneformer.engine.cuda.geometry import H200, Machine
from laneformer.engine.cuda.memory import Column, DeviceMemory
from laneformer.engine.cuda.passes import Decoding, PassDecoder, draft, plan_columns
from laneformer.engine.cuda.planning import plan
from laneformer.engine.decoder import RequestFailed, Sampling
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.harness import SMALL, random_model, small_config, tensors_of
from tests.laneformer.cuda.reference import expected, kept_at

pytestmark = pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING)
GREEDY = Sampling(top_p=1.0)


class EmulatedPasses(PassDecoder):
    """PassDecoder itself, with its memory on the CPU and the kernel on the emulator."""

    missing_blocks = 0  # for whose words the others wait in vain

    def __init__(self, builds: Path, columns: int, seed: int = 0, changes: dict[str, Any] | None = None, **shape: Any):
        self.config, self.limit_s, self.passes, self.seed = small_config(**(changes or {})), 10.0, 0, seed
        dtype = shape.pop("dtype", "bf16")
        self.geometry = plan(
            self.config, dtype, SMALL, mma_columns=columns, **{"warps": 2, "chunk_bytes": 512, **shape}
        )
        self.model = random_model(self.config, dtype)
        devices = range(self.geometry.devices)
        self.memories = [DeviceMemory(self.geometry, tensors_of(self.model, dtype), i, "cpu") for i in devices]
        for memory in self.memories:
            memory.kv.fill_(0x7FFF)  # no numbers
        source = source_of("passes", self.geometry) + "EMULATE(pass, Decode)\n"
        self.library = emulator.build(source, INCLUDES, {"TABLE": "constexpr"}, builds)

    def _launch(self, arguments: Sequence[ctypes.Structure]) -> None:
        words = {f"{name} {m.index}": getattr(m, name) for m in self.memories for name in ("lane_words", "inbox")}
        emulator.launch(
            self.library, "pass", arguments, blocks=self.geometry.blocks - self.missing_blocks,
            threads=32 * self.geometry.warps, watchdog=self.missing_blocks > 0,
            shared_bytes=self.geometry.shared_bytes, seed=self.seed + self.passes,
            names={name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in words.items()},
        )  # fmt: skip

    def logits(self, columns: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Of one pass of (token, position, sequence): (columns, V)."""
        rows = torch.full((len(columns), self.config.vocab_size), float("nan"))
        self.run([Column(*column, GREEDY) for column in columns], rows)
        return rows


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
    """Alone, as a prompt in pieces, and between other sequences: the same bits, beyond the windows of 6 as well."""
    ids, other = text(13), text(13, 2)
    right = one_by_one(EmulatedPasses(cuda_builds, 1), ids)
    five = EmulatedPasses(cuda_builds, 5, seed=3)
    pieces = [five.logits([(ids[i], i, 2) for i in range(a, b)]) for a, b in ((0, 5), (5, 6), (6, 10), (10, 13))]
    assert torch.equal(torch.cat(pieces), right)
    among = EmulatedPasses(cuda_builds, 5, seed=9)
    rows = []
    for i in range(0, 12, 2):
        own, beside = [(ids[j], j, 1) for j in (i, i + 1)], [(other[j], j, s) for j in (i, i + 1) for s in (0, 4)]
        rows.append(among.logits([*beside[:1], *own, *beside[2:4]])[1:3])
    assert torch.equal(torch.cat(rows), right[:12])


def test_drafts_that_were_wrong_leave_nothing(cuda_builds: Path) -> None:
    """Four wrong ones after each token; the rings of the windows have room for them."""
    ids = text(12)
    right = one_by_one(EmulatedPasses(cuda_builds, 1), ids)
    five, rows = EmulatedPasses(cuda_builds, 5), []
    for i, token in enumerate(ids):
        rows.append(five.logits([(token, i, 0), *((95 - token, i + n, 0) for n in range(1, 5))])[:1])
    assert torch.equal(torch.cat(rows), right)


def test_a_wait_in_vain_ends_its_request_alone(cuda_builds: Path) -> None:
    passes, ids = EmulatedPasses(cuda_builds, 1), text(3)
    passes.missing_blocks, passes.limit_s = 1, 0.05
    with pytest.raises(RequestFailed, match=r"the pass kernel waited 0.05 s in vain: lane \d, layer \d, exchange '"):
        one_by_one(passes, ids)
    passes.missing_blocks, passes.limit_s = 0, 10.0
    assert torch.equal(one_by_one(passes, ids), one_by_one(EmulatedPasses(cuda_builds, 1), ids))


def test_two_gpus(cuda_builds: Path) -> None:
    two, one = EmulatedPasses(cuda_builds, 3, devices=2, blocks_per_lane=4), EmulatedPasses(cuda_builds, 1)
    ids = text(6)
    assert torch.equal(two.logits([(ids[i], i, 0) for i in range(3)]), one_by_one(one, ids[:3]))


def decode(passes: PassDecoder, prompts: list[list[int]], sampling: list[Sampling], **options: Any) -> list[Decoding]:
    pairs = zip(prompts, sampling, strict=True)
    made = [Decoding(list(ids), 9, frozenset(), s, **options) for ids, s in pairs]
    while not all(s.finished for s in made):
        passes.advance(made)
    return made


def test_batches_and_drafts_change_no_token(cuda_builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, drawn and filtered; prompts of different lengths, read in pieces beside those that decode."""
    prompts = [text(3), [5, 6, 7, 5, 6, 7, 5, 6], text(11, 4)]
    ways = [GREEDY, Sampling(7, 2.0, 1.0, 0.0, 0), Sampling(8, 0.7, 0.9, 0.01, 12)]
    alone = [decode(EmulatedPasses(cuda_builds, 1), [p], [w])[0].tokens for p, w in zip(prompts, ways, strict=True)]
    five = EmulatedPasses(cuda_builds, 5)
    assert [s.tokens for s in decode(five, prompts, ways)] == alone
    five.passes, at = 0, {len(p): p + tokens for p, tokens in zip(prompts, alone, strict=True)}

    def oracle(ids: Sequence[int], most: int) -> list[int]:
        """What comes, but for the third."""
        text = next(text for length, text in at.items() if ids[:length] == text[:length])
        return [token if i != 2 else 95 - token for i, token in enumerate(text[len(ids) :][:most])]

    monkeypatch.setattr("laneformer.engine.cuda.passes.draft", oracle)
    drafting = [decode(five, [p], [w], speculate=4)[0] for p, w in zip(prompts, ways, strict=True)]
    assert [s.tokens for s in drafting] == alone
    assert [s.accepted for s in drafting] == [6, 6, 6]
    assert all(s.proposed > s.accepted for s in drafting)
    assert five.passes <= sum(-(-len(p) // 5) + 3 for p in prompts), "9 tokens in 4 passes at most"


def test_columns_leave_memory_for_the_ring() -> None:
    """The 2b model: eight columns on an H200, fewer where the ring would be too small."""
    config = LaneformerConfig.from_flavor("2b")
    sizes = [plan_columns(config, "bf16", m).mma_columns for m in (H200, Machine(108, 163 << 10, 80))]
    assert sizes == [8, 4]
    with pytest.raises(ValueError, match=r"head matrix of a lane, 52 x 64.*rows of 16"):
        plan_columns(small_config(vocab_size=104), "bf16", H200)


def test_drafts_follow_the_latest_earlier_place() -> None:
    assert draft([1, 2, 3, 9, 2, 3, 8, 2, 3], 2) == [8, 2]
    assert draft([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert draft([1, 2, 3, 4], 3) == []
    assert draft([1, 2, 1, 2], 0) == []
