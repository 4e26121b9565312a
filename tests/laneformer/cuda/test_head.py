"""The model's own head on the CUDA engine: its logits on the emulator, planted faults, drafts that are the CPU's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from laneformer import Laneformer
from laneformer.config import DRAFT_IDS, MTP, LaneformerConfig
from laneformer.engine import Engine
from laneformer.engine.cuda import executor as executor_module
from laneformer.engine.cuda import passes as passes_module
from laneformer.engine.cuda import prefill
from laneformer.engine.cuda.head import rows_of
from laneformer.engine.cuda.launch import NotResident
from laneformer.engine.cuda.memory import TORCH_TYPES
from laneformer.model import deliver, run_layers
from laneformer.positions import rope_table
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import EmulatedPasses, emulated_engine
from tests.laneformer.cuda.emulator import EmulationError, plain_accesses
from tests.laneformer.cuda.harness import plain_model, random_model, small_config, tensors_of
from tests.laneformer.cuda.planted import plant_all, put_in_force
from tests.laneformer.cuda.reference import DRAWS, KeptCache, kept_at, worst_roundings
from tests.laneformer.cuda.stand_ins import passes_of
from tests.laneformer.cuda.test_passes import text
from tests.laneformer.cuda.test_prefill import PlainCache
from tests.laneformer.engine.assets import generate_together
from tests.proofs import CORE_SOURCES, KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES, *CORE_SOURCES),
    pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING),
]
HEAD = {"num_nextn_predict_layers": 1, "draft_vocab_size": 40}
CERTAIN, CHAINED = 8, 2  # positions whose next id is known; drafts after the first
OTHER = 2  # another column than that of the certain positions, in the model's passes


def emulated(builds: Path, columns: int = 4, **options: Any) -> EmulatedPasses:
    changes = {**HEAD, **options.pop("changes", {})}
    return EmulatedPasses(builds, columns, changes=changes, sequences=3, **options)


def drafted(passes: EmulatedPasses, ids: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Three positions a pass beside another sequence's, then drafts: logits (positions, ids of the head), and
    the keys and values of all layers.
    """
    head: Any = passes.head
    layers, rows = range(passes.config.num_hidden_layers), list[np.ndarray]()
    kept: list[list[Tensor]] = [[] for _ in layers]
    for start in range(0, CERTAIN, 3):
        mine = range(start, min(start + 3, CERTAIN))
        passes.logits([(ids[-1 - start], start, OTHER), *((ids[i], i, 0) for i in mine)])
        for layer in layers:
            kept[layer] += [kept_at(passes, layer, i) for i in mine]
        asked = [(ids[i + 1], i, 0) for i in mine]
        rows.append(head.run(asked, range(1, 1 + len(mine)), False, range(len(mine))))
    last = len(mine) - 1
    for position in range(CERTAIN, CERTAIN + CHAINED):
        rows.append(head.run([(ids[position + 1], position, 0)], [last], True, [0]))
        last = 0
    of_block = [kept_at(head.block, 0, i) for i in range(CERTAIN + CHAINED)]
    stacked = [torch.stack(layer, 2)[:, None] for layer in [*kept, of_block]]
    return torch.from_numpy(np.concatenate(rows)), [(keys, values) for keys, values in stacked]


def reference(model: Any, ids: list[int], kept: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The same in float64 over the kernels' own keys and values; and the block's, as they would have been."""
    config, block = model.config, model.config.num_hidden_layers
    cache: Any = KeptCache(kept)
    positions, tokens = torch.arange(CERTAIN), model.tok_embeddings(torch.tensor(ids))[None, :, None]
    embedding, rope = tokens[:, :CERTAIN, 0], rope_table(config, positions)
    h, tail = run_layers(model.layers, config, embedding, rope, model.masks(positions, positions), cache)
    h, outputs, offered = deliver(h, tail, config), list[Tensor](), list[Tensor]()
    seen = torch.ones(CERTAIN, CERTAIN, dtype=torch.bool).tril()
    for first in [0, *range(CERTAIN, CERTAIN + CHAINED)]:
        end = max(CERTAIN, first + 1)
        own: Any = KeptCache({block: tuple(part[:, :, :end] for part in kept[block])})  # type: ignore[arg-type]
        x = model.mtp.hidden_norm(h) + model.mtp.embedding_norm(tokens[:, first + 1 : end + 1])
        turns = rope_table(config, torch.arange(first, end))
        h, _ = model.mtp.layer(x, (None, None), turns, None if first else seen, own)
        outputs.append(model.lm_head(h.expand(-1, -1, config.num_lanes, -1), model.mtp.norm)[0])
        offered.append(own.offered[0])
        h = h[:, -1:]
    return torch.cat(outputs), torch.cat(offered, 3)[:, 0]


def check(passes: EmulatedPasses) -> None:
    ids = text(CERTAIN + CHAINED + 1)
    logits, kept = drafted(passes, ids)
    can: Any = passes.head
    right, offered = reference(passes.model, ids, kept)
    draws = []
    for seed in range(DRAWS):
        with worst_roundings(passes.model, torch.Generator().manual_seed(seed)):
            draws.append(reference(passes.model, ids, kept))
    tolerance = max(float((drawn - right)[:, can.ids].abs().max()) for drawn, _ in draws)
    assert float((logits - right[:, can.ids]).abs().max()) <= tolerance
    off = torch.stack([(drawn - offered).abs().amax((1, 2, 3), True) for _, drawn in draws]).amax(0)
    least, most = ((offered + s * off).to(TORCH_TYPES[passes.geometry.half]).double() for s in (-1, 1))
    both = torch.cat(kept[-1])
    assert ((least <= both) & (both <= most)).all(), "keys or values of the head's block"


@pytest.mark.parametrize(
    "options",
    [
        {"changes": {"broadcast_delay": 0}},
        {"dtype": "int8"},
        {"changes": {"flush": True}},  # the head reads what the model has summed, and sums nothing again
        {"changes": {"broadcast_delay": 2, "draft_vocab_size": 0}, "dtype": "fp16"},
        {"changes": {"broadcast_delay": 2, "rebroadcast_early": True}, "devices": 2, "blocks_per_lane": 4},
        # lanes whose streams differ score their own ids: all 40 are of one of them
        {"changes": {"replicated_rmsn_scale": False, "deliver_tail": False}},
    ],
    ids=lambda options: str(options),
)
def test_every_logit(options: dict[str, Any], cuda_builds: Path) -> None:
    check(emulated(cuda_builds, **options))


def test_lanes_share_the_ids_out() -> None:
    """Evenly where their streams are the same, whatever part of the vocabulary they are of."""
    config = small_config(**HEAD)
    tensors = tensors_of(random_model(config), "bf16")
    assert rows_of(config, tensors).tolist() == [[*range(20)], [*range(20, 40)]]
    own = small_config(**HEAD, deliver_tail=False)
    assert rows_of(own, tensors).tolist() == [[*range(40)], [-1] * 40]
    tensors[DRAFT_IDS].values[3] = 2
    with pytest.raises(ValueError, match="ids below 96 in ascending order, each once"):
        rows_of(config, tensors)


FAULTS = {  # in the block's kernels (planted.py), and what the emulator says
    "a key goes to the next row of the cache": (
        "block.cuh", "keys.slots + keys.newest * 2", "keys.slots + (keys.newest + HERE) * 2", "numbers",
    ),
    "a column goes on from another one": (
        "block.cuh", "from = p.origins[column];", "from = HERE ? 0 : p.origins[column];", "numbers",
    ),
    "the last layer's partial outputs are left out": (
        "block.cuh", "i < kTails; ++i", "i < kTails - HERE; ++i", "numbers",
    ),
    "a lane's own are added twice": (
        "block.cuh", "l == lane ? 0.0f : sent", "l == lane && !HERE ? 0.0f : sent", "numbers",
    ),
    "the streams that are taken are those of the pass before": (
        "block.cuh", "kHidden, epoch_of(-1), kStream", "kHidden, epoch_of(-1 - HERE), kStream",
        "overwritten early|deadlock",
    ),
    "the entry has the epoch of the layer": (
        "block.cuh", "return token_epoch * (kLayers + DRAFTS)", "return token_epoch * (kLayers + DRAFTS - HERE)",
        "the epoch does not grow|overwritten early|deadlock",
    ),
}  # fmt: skip


def told(passes: EmulatedPasses, right: Tensor | None) -> str:
    passes.forget()
    try:
        logits, _ = drafted(passes, text(CERTAIN + CHAINED + 1))
    except EmulationError as error:
        return str(error)
    return "" if right is None or torch.equal(logits, right) else "numbers"


def test_every_fault_is_found(cuda_builds: Path) -> None:
    passes = emulated(cuda_builds)
    block: Any = passes.head.block  # type: ignore[union-attr]
    right, _ = drafted(passes, text(CERTAIN + CHAINED + 1))
    plant_all(block, cuda_builds, [fault[:3] for fault in FAULTS.values()])
    for number, (name, found) in enumerate([("", "^$"), *((n, f[3]) for n, f in FAULTS.items())]):
        put_in_force(block, number)
        said = told(passes, right)
        assert re.search(found, said), f"{name}: {said}"


def test_a_tail_that_is_not_sent_is_found(cuda_builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, _ = drafted(emulated(cuda_builds), text(CERTAIN + CHAINED + 1))
    delivers = LaneformerConfig.delivers
    passes = emulated(cuda_builds)
    with monkeypatch.context() as patch:
        patch.setattr(LaneformerConfig, "delivers", lambda *_: False)
        _ = passes.library  # the model's kernels do not know of the head
    assert LaneformerConfig.delivers is delivers
    assert told(passes, right) == "numbers"


RACES = {
    "a sum is where the one before is read": (
        "block.cuh", "sync_block();  // all have read it\n    inverse.y",
        "if (!HERE) sync_block();  // all have read it\n    inverse.y",
    ),
    "the stream's sum is where the embedding's is read": (
        "block.cuh", "inverse.y = inverse_rms(of_embedding, per_warp);\n    sync_block();",
        "inverse.y = inverse_rms(of_embedding, per_warp);\n    if (!HERE) sync_block();",
    ),
}  # fmt: skip


def test_races_are_found_and_there_is_none(cuda_builds: Path) -> None:
    passes = emulated(cuda_builds)
    block: Any = passes.head.block  # type: ignore[union-attr]
    block.races = True
    plant_all(block, cuda_builds, RACES.values())
    for number in range(len(RACES) + 1):
        put_in_force(block, number)
        said = told(passes, None)
        assert bool(re.search("race: [a-z]+ of byte [0-9]+ of shared memory, in no order", said)) == bool(
            number
        )
        reads, writes = plain_accesses(block.library)
        assert number or reads > writes > 5_000


@pytest.mark.parametrize("chunk", [4, 1024])
def test_pytorch_fills_the_blocks_cache(
    chunk: int, cuda_builds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts that it reads: the bits of model.py in 16 bits over a plain cache."""
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", chunk)
    passes, ids = emulated(cuda_builds), text(12)
    for start, end in (0, 5), (5, 11):
        assert [*passes.read(ids[start:end], 1, start, 99, ids[start + 1 : end + 1])] == []
    model: Any = plain_model(passes.config, passes.tensors, "bf16")
    plain: Any = PlainCache()
    for first, end in [(0, 4), (4, 5), (5, 9), (9, 11)] if chunk == 4 else [(0, 5), (5, 11)]:
        positions, keys = torch.arange(first, end), torch.arange(end)
        embedding, rope = model.tok_embeddings(torch.tensor([ids])), rope_table(passes.config, positions)
        new, masks = embedding[:, first:end], model.masks(positions, keys)
        h, tail = run_layers(model.layers, passes.config, new, rope, masks, plain)
        token = embedding[:, first + 1 : end + 1, None]
        x = model.mtp.hidden_norm(deliver(h, tail, passes.config)) + model.mtp.embedding_norm(token)
        seen = keys <= positions[:, None]
        model.mtp.layer(x, (None, None), rope, None if first == 0 else seen, plain)
        plain.length = end
    block: Any = passes.head.block  # type: ignore[union-attr]
    memories = [memory.of(kv) for memory, kv in zip(block.memories, passes.caches.kv[1][1:], strict=True)]
    bits = prefill.DeviceCache(memories, 11).read(0)
    assert torch.equal(bits, plain.kept[passes.config.num_hidden_layers])


# ---- the engine ----

MOST_IDS = {**HEAD, "draft_vocab_size": 80}


def knowing(config: LaneformerConfig) -> Laneformer:
    """A model whose layers say little, with a head that is right about most of what follows."""
    model = random_model(config)
    for name, parameter in model.named_parameters():
        if "layer" in name and not name.endswith("norm.weight"):
            parameter.mul_(0.25)
        if name == f"{MTP}hidden_norm.weight":
            parameter.mul_(0.05)
    mtp: Any = model.mtp
    mtp.embedding_norm.weight.fill_(1)
    mtp.norm.load_state_dict(model.norm.state_dict())
    return model


def drafting(engine: Engine) -> Engine:
    decoder: Any = engine._open()
    of = getattr(decoder, "executor", None)
    (of.schedule if of else decoder).fix_cost(0.001, 0.001)
    return engine


def recorded(engine: Engine) -> list[tuple[list[int], int, np.ndarray]]:
    decoder: Any = engine._open()
    return getattr(getattr(decoder, "executor", None), "schedule", decoder).recorded_drafts()


FILTERED: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "seed": 3}
PENALISED = {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.1}  # the schedule draws


@pytest.mark.parametrize(
    ("delay", "dtype", "sampling"),
    [(0, "bf16", [FILTERED]), (1, "int8", [{}, FILTERED]), (2, "bf16", [{}, PENALISED])],
)
def test_drafts_are_the_cpus_and_change_no_token(
    delay: int, dtype: str, sampling: list[dict[str, Any]], cuda_builds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values in the same 16 bits on both. Prompts that a pass of eight columns reads."""
    config, prompt, right = small_config(**MOST_IDS, broadcast_delay=delay), text(8), 0
    tensors = tensors_of(knowing(config), "bf16")
    emulated_engine(monkeypatch, cuda_builds, 8, sequences=12)
    cpu = Engine(config, tensors, dtype=dtype, math="exact", kv_dtype="bf16", threads=1)
    with cpu, Engine(config, tensors, dtype=dtype, device="cuda") as gpu:
        assert gpu.draft_head is not None
        assert gpu.draft_head.ids == 80
        for engine in (cpu, gpu):
            recorded(drafting(engine))
        for options in sampling:
            given = {"max_new_tokens": 12, "reuse_prefix": False, **options}
            plain = cpu.generate(prompt, speculate=0, **given)
            found = [engine.generate_detailed(prompt, speculate=6, **given) for engine in (cpu, gpu)]
            assert [generation.ids for generation in found] == [plain, plain]
            assert found[0].statistics == found[1].statistics
            drawn, again = ([(ids, made) for ids, made, _ in recorded(engine)] for engine in (cpu, gpu))
            assert drawn == again
            right += sum(made > 0 and ids[8:] == plain[: len(ids) - 8] for ids, made in again)
    assert right > 1, "drafts after drafts that were right"


def test_company_prefixes_and_prompts_that_pytorch_reads(
    cuda_builds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of the head's are there for every position: those that nobody has written are no numbers."""
    monkeypatch.setattr(executor_module, "PIECE_TOKENS", 5)
    monkeypatch.setattr(passes_module, "COLUMN_TOKENS", 1)  # of eight columns
    config = small_config(**MOST_IDS)
    emulated_engine(monkeypatch, cuda_builds, 8, sequences=12)
    prompts = [text(3), text(14)]
    with Engine(config, tensors_of(knowing(config), "bf16"), device="cuda") as engine:
        recorded(drafting(engine))
        beside = generate_together(engine, prompts, max_new_tokens=7)
        again = engine.generate_detailed(prompts[1], max_new_tokens=7)
        assert again.statistics.reused_tokens == 13
        drafts = recorded(engine)
        assert len(drafts) > 8
        assert all(np.isfinite(logits).sum() == 80 for *_, logits in drafts)
        plain = generate_together(engine, prompts, max_new_tokens=7, speculate=0)
        assert [*beside, again.ids] == [*plain, plain[1]]
        monkeypatch.setattr(passes_of(engine).head, "run", refused)
        without = engine.generate_detailed(prompts[1], max_new_tokens=7)
        assert (without.ids, recorded(engine)) == (plain[1], [])


def refused(*_: Any) -> None:
    raise NotResident("the head's blocks do not fit beside those of others")


def test_a_head_that_fails_at_load_drafts_nothing(cuda_builds: Path) -> None:
    passes = emulated(cuda_builds)
    head: Any = passes.head
    passes.logits([(1, 0, 0)])
    assert head.fails() == ""
    head.block.limit_s, head.block.missing_blocks = 0.05, 1
    assert re.search("the pass kernel waited 0.05 s in vain: lane ., layer 0, exchange", head.fails())
    passes.head = None
    with pytest.warns(UserWarning, match="own head drafts nothing, as its kernel fails: the pass kernel"):
        passes._draft_with(head)
    assert passes.head is None
