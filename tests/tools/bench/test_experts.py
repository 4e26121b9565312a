"""Random files of mixtures of experts: the engine runs them, and a token's bytes are those of the experts it takes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from laneformer import Engine
from tools.bench import decode, experts, llamacpp

SMALL = {
    "context_length": 64, "vocab_size": 320, "block_count": 2, "embedding_length": 64, "head_count": 4,
    "head_count_kv": 2, "key_length": 32, "value_length": 32, "expert_count": 8, "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}  # fmt: skip


@pytest.mark.parametrize("flavor", experts.FIELDS)
def test_the_engine_runs_the_file_and_active_bytes_are_counted(
    flavor: experts.Flavor, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    fields = {**experts.FIELDS[flavor], **SMALL}
    shapes = experts.shapes_of(flavor, fields)
    path = tmp_path / "model.gguf"
    llamacpp.write_random_gguf(path, flavor, fields, shapes, "bf16")
    with Engine.from_pretrained(path, cache=False, threads=1) as engine:
        assert len(engine.generate([5, 6], max_new_tokens=4, ignore_eos=True)) == 4
    wide = {name: 2 if len(size) > 1 and not name.endswith(".bias") and "gate_inp" not in name else 4
            for name, size in shapes.items()}  # fmt: skip
    read = sum(
        wide[name] * math.prod(size) * (2 / 8 if "_exps." in name else 1)
        for name, size in shapes.items()
        if "token_embd" not in name
    )
    assert llamacpp.sizes_of(path)[2] == int(read)


def test_a_flavor_of_experts_needs_its_own_blocks() -> None:
    with pytest.raises(ValueError, match="'gpt-oss' is a GGUF file; give --dtype gguf"):
        decode.measure(decode.Options(flavor="gpt-oss", against=""), None)
