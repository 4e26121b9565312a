"""Tests of HF folder -> DCP checkpoint -> HF folder."""

import json
from pathlib import Path

import pytest
import torch

from laneformer.hf.export import export
from laneformer.hf.load_folder import import_folder, read_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_import_and_export_give_the_same_bits(tmp_path, checkpoint, model, dtype):
    # only weights are rounded; a link's run folder is that of the real checkpoint
    linked = tmp_path / "step-30"
    linked.symlink_to(checkpoint)
    export(linked, tmp_path / "hf", dtype, max_shard_bytes=1_000_000)
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 2
    stored = read_weights(tmp_path / "hf", model.config)
    rounded = {
        name: weight.to(getattr(torch, dtype)) for name, weight in model.state_dict().items()
    }
    assert stored.keys() == rounded.keys()
    assert all(torch.equal(stored[name], weight) for name, weight in rounded.items())
    report = import_folder(tmp_path / "hf", tmp_path / "run")
    assert (report["dtype"], report["tokenizer"]) == (dtype, True)
    export(Path(report["checkpoint"]), tmp_path / "again", dtype, max_shard_bytes=1_000_000)
    for file in (tmp_path / "hf").iterdir():
        if file.name != "README.md":  # it tells the step
            assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_import_refuses_what_is_not_a_laneformer(tmp_path, export_folder):
    hf = tmp_path / "hf"
    hf.mkdir()
    config = json.loads((export_folder[0] / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type is 'llama', not 'laneformer'"):
        import_folder(hf, tmp_path / "run")
    (hf / "config.json").write_text(json.dumps({**config, "vocab_size": 2048}))
    with pytest.raises(ValueError, match=r"holds no model\*.safetensors"):
        import_folder(hf, tmp_path / "run")
    (hf / "model.safetensors").symlink_to(export_folder[0] / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"tok_embeddings.weight has shape \(1024, 128\), the config says \(2048, 128\)",
    ):
        import_folder(hf, tmp_path / "run")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"index.json lists files that are missing: \['model-00002-of-00002"
    ):
        import_folder(hf, tmp_path / "run")
    (hf / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index.json is no index with a weight_map: KeyError"):
        import_folder(hf, tmp_path / "run")
    # no refusal leaves a run half-written
    assert not (tmp_path / "run").exists()
