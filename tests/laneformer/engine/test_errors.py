"""Tests of bad folders, options and prompts: each a ValueError that names the fault, never a crash."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from laneformer.config import hf_name
from laneformer.engine import Engine
from laneformer.engine.cpu.decoder import MAX_THREADS
from laneformer.engine.cpu.packed_files import FOLDER
from tests.laneformer.engine.assets import (
    TORCH_DTYPES,
    engine_of,
    random_ids,
    small_model,
    write_folder,
)

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def engine():
    with engine_of(small_model()) as engine:
        yield engine


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "hf", small_model())


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_weights(folder, change):
    state = load_file(folder / WEIGHTS)
    change(state)
    save_file(state, folder / WEIGHTS)


@pytest.fixture
def refuses(folder):
    def check(message, **options):
        with pytest.raises(ValueError, match=message):
            Engine.from_pretrained(folder, **options)

    return check


OPTIONS = [
    ({"temprature": 1.0}, "did you mean 'temperature'"),
    ({"best_of": 2}, "choose from"),
    ({"repetition_penalty": 0}, "repetition_penalty = 0 is outside 0.01 to 100"),
    ({"frequency_penalty": 2.5}, "frequency_penalty = 2.5 is outside -2.0 to 2.0"),
    ({"logit_bias": [1, 2]}, "must map token ids to numbers"),
    ({"logit_bias": {3: "much"}}, r"logit_bias\[3\] = 'much'"),
    ({"logit_bias": {3: -101}}, r"logit_bias\[3\] = -101 is outside -100.0 to 100.0"),
    ({"logit_bias": {100: 1.0}}, "logit_bias holds 100"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias must be a flat sequence of integers"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens = 9 exceeds max_new_tokens = 8"),
    ({"speculate": 32}, "speculate = 32 is outside 0 to 31"),
    ({"speculate": True}, "speculate = True must be an integer"),
    ({"reuse_prefix": 1}, "reuse_prefix = 1 must be True or False"),
    ({"logprobs": 2}, "use generate_detailed"),
    ({"temperature": float("nan")}, "finite"),
    ({"temperature": "hot"}, "must be a finite number"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 2.5}, "integer"),
    ({"stop_ids": [100]}, "stop_ids holds 100"),
    ({"prediction": [1000]}, "prediction holds 1000"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
]
PROMPTS = [
    ([], "empty"),
    ([1, 100], "holds 100"),
    ([-1], "holds -1"),
    ([0.5], "integers"),
    ([[1, 2]], "flat"),
    (["a"], "integers"),
    ([1] * 97, "97 tokens, more than the 96 that fit"),
]


SCORING = [
    ({"start": 0}, "start = 0 is outside 1 to 5"),
    ({"top": -1}, "top = -1 is outside 0 to 100"),
    ({"top": 1.5}, "top = 1.5 must be an integer"),
    ({"reuse_prefix": None}, "reuse_prefix = None must be True or False"),
]


def test_options_and_prompts(engine):
    for options, message in OPTIONS:
        with pytest.raises(ValueError, match=message):
            engine.generate([1], **options)
    for options, message in SCORING:
        with pytest.raises(ValueError, match=message):
            engine.logprobs([1, 2, 3, 4, 5], **options)
    for ids, message in PROMPTS:
        for call in (engine.generate, engine.stream, engine.logits):
            with pytest.raises(ValueError, match=message):
                call(ids)
    assert len(engine.logprobs([1] * 97)) == 96  # the last id is only predicted
    with pytest.raises(ValueError, match="98 tokens, more than the 97 that fit"):
        engine.logprobs([1] * 98)


CHOICES = r"choose from \('auto', .*'int8', 'int4', 'gguf'\)"
ENGINE_OPTIONS = [
    ({"device": "cuda:x"}, "device = 'cuda:x' is unknown"),
    ({"device": "tpu"}, "device = 'tpu'"),
    ({"dtype": "int3"}, f"dtype = 'int3' is unknown; {CHOICES}"),
    ({"dtype": torch.float64}, "dtype = torch.float64 is unknown"),
    (
        {"math": "int3"},
        r"'int3' is unknown; choose from \('auto', 'fast', 'exact', 'bf16', 'int8'\)",
    ),
    ({"dtype": "int8", "math": "bf16"}, "math = 'bf16' needs bf16 weights, these are int8"),
    (
        {"dtype": "int4", "math": "exact"},
        r"math = 'exact' needs .* these are int4; use math = 'int8'",
    ),
    ({"math": "int8"}, "math = 'int8' needs int8 or int4 or gguf weights, these are fp32"),
    ({"threads": MAX_THREADS + 1}, f"threads = {MAX_THREADS + 1} is outside 1 to {MAX_THREADS}"),
    ({"isa": "sse9"}, "isa = 'sse9' cannot run here"),
    ({"kv_dtype": "int4"}, "kv_dtype = 'int4' is unknown"),
    ({"cache_bytes": -1}, "cache_bytes = -1 is outside 0"),
    ({"cache_bytes": "1g"}, "cache_bytes = '1g' must be an integer"),
    ({"cache_dir_bytes": -1}, "cache_dir_bytes = -1 is outside 0"),
    ({"cache_dir": "/proc/nothing"}, "cannot be used.*choose a directory"),
    ({"cache_dir": "x", "device": "cuda:0"}, "use device = 'cpu'"),
    ({"context_tokens": 2**31 - 1}, "2147483647 needs [0-9,.]+ GB .* this machine has [0-9,.]+ GB"),
]


def test_engine_options(refuses, monkeypatch):
    for options, message in ENGINE_OPTIONS:
        if "cache_dir" in options:
            devices = "laneformer.engine.loading.cuda_devices"
            monkeypatch.setattr(devices, lambda device: [0] if "cuda" in device else [])
        refuses(message, **options)


def test_missing_files(tmp_path, folder, refuses):
    with pytest.raises(ValueError, match="not a folder"):
        Engine.from_pretrained(tmp_path / "nowhere")
    (folder / WEIGHTS).unlink()
    refuses("holds no model")
    (folder / "config.json").unlink()
    refuses("is missing")


def test_configs(folder, refuses):
    text = (folder / "config.json").read_text()
    for values, message in (
        ({"model_type": "llama"}, "architectures = .* is not supported; only LlamaForCausalLM"),
        ({"num_lanes": 5}, "not divisible"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"swa_layers": 3}, "wrong type"),
        ({"norm_eps": "small"}, "norm_eps = .small. must be a number greater"),
        ({"vocab_size": 200}, "has shape"),
        ({"num_hidden_layers": 6}, "lacks 9 tensors, such as layers.5"),
        ({"num_hidden_layers": 4}, "tensors this architecture has not"),
        ({"eos_token_id": 100}, "eos_token_id 100"),
    ):
        (folder / "config.json").write_text(text)
        change_config(folder, **values)
        refuses(message)
    (folder / "config.json").write_text("{")
    refuses("not valid JSON")


def test_makers_sampling_that_cannot_be_names_its_file(folder, refuses):
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_k": -1}')
    refuses(r"generation_config\.json: top_k = -1 is outside 0 to .*; mend or remove that value")


def test_a_misspelt_key_is_refused_and_bookkeeping_is_not(folder, refuses):
    # what Transformers adds to any config.json passes
    change_config(
        folder, transformers_version="5.0", auto_map={}, torch_dtype="float32", use_cache=True
    )
    Engine.from_pretrained(folder).close()
    path = folder / "config.json"
    path.write_text(path.read_text().replace("broadcast_delay", "broadcast_dely"))
    refuses("did you mean 'broadcast_delay'")


def test_weights_that_are_no_safetensors(folder, refuses):
    whole, norm = (folder / WEIGHTS).read_bytes(), "model.norm.weight"
    size = int.from_bytes(whole[:8], "little")
    # cut in the header's length, in the header, in the data, and before the last byte
    damaged = [whole[:length] for length in (0, 7, 9, 500, len(whole) // 2, len(whole) - 1)]
    # a valid length of a header that is not JSON
    damaged.append(b"\x10" + bytes(7) + b"not json at all!" + bytes(64))
    for values in ({"data_offsets": [0, -8]}, {"shape": [48.0]}):
        header = json.loads(whole[8 : 8 + size])
        header[norm].update(values)
        text = json.dumps(header).encode()
        damaged.append(len(text).to_bytes(8, "little") + text + whole[8 + size :])
    for data in damaged:
        (folder / WEIGHTS).write_bytes(data)
        refuses(r"model\.safetensors is truncated, or has no valid safetensors header")
    for tensor, message in (
        (torch.ones(47), r"norm\.weight has shape \(47,\)"),
        (torch.ones(48, dtype=torch.int64), "type I64"),
    ):
        (folder / WEIGHTS).write_bytes(whole)
        change_weights(folder, lambda state: state.update({norm: tensor}))  # noqa: B023
        refuses(message)


def test_tensors_may_begin_at_any_byte(folder):
    whole = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(whole[:8], "little")
    expected = logits_of(folder)
    # one more space in the header shifts all tensors by a byte
    odd = (size + 1).to_bytes(8, "little") + whole[8 : 8 + size] + b" " + whole[8 + size :]
    (folder / WEIGHTS).write_bytes(odd)
    np.testing.assert_array_equal(logits_of(folder), expected)


def logits_of(folder) -> np.ndarray:
    with Engine.from_pretrained(folder, cache=False) as engine:
        return engine.logits([1, 2, 3])


def test_values_that_are_not_finite_or_do_not_fit_are_named(folder, refuses):
    whole = (folder / WEIGHTS).read_bytes()
    for name, value, dtype in (
        ("layers.1.attention.wk.weight", "nan", "auto"),
        ("tok_embeddings.weight", "nan", "auto"),
        ("lm_head.weight", "nan", "auto"),
        ("norm.weight", "inf", "auto"),
        ("layers.2.feed_forward.w3.weight", "nan", "int8"),
        ("layers.2.feed_forward.w3.weight", "inf", "int8"),
        ("layers.2.feed_forward.w3.weight", "-inf", "int4"),
        ("layers.0.attention.wq.weight", "1e5", "fp16"),
    ):
        (folder / WEIGHTS).write_bytes(whole)
        change_weights(folder, lambda state: state[hf_name(name)].view(-1)[-1].fill_(float(value)))  # noqa: B023
        refuses(rf"tensor {name} holds values that are not finite", dtype=dtype)
        assert not list((folder / FOLDER).glob("*")), "such weights are not kept"


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_conversions_round_as_pytorch_does(dtype):
    model = small_model()
    with torch.no_grad():  # subnormal in fp16, and ties
        model.layers[0].attention.wq.weight.view(-1)[:4] = torch.tensor(
            [3e-8, 1e-5, 1 + 2**-9, 1 + 3 * 2**-12]
        )
    ids = random_ids(model.config, 30)
    with engine_of(model, dtype=dtype) as converted:
        logits = converted.logits(ids)
    for name, p in model.named_parameters():
        if not name.endswith("norm.weight"):  # norm scales stay in float32
            p.data = p.data.to(TORCH_DTYPES[dtype]).float()
    with engine_of(model) as rounded:
        np.testing.assert_array_equal(rounded.logits(ids), logits)


def test_sharded_checkpoints(folder, refuses):
    expected, state = logits_of(folder), load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(state)
    parts = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    np.testing.assert_array_equal(logits_of(folder), expected)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refuses("files that are missing")


@pytest.mark.parametrize(
    ("head", "scale"),
    [("vocab_parallel", 1e20), ("replicate", 1e30), ("lane", 1e38), ("vocab_parallel", 1e38)],
)
def test_activations_beyond_float32_are_an_error(head, scale):
    # their norms would be zeros and all tokens equally likely
    model = small_model(lm_head_type=head)
    with torch.no_grad():
        (model.lm_head if scale > 1e35 else model.layers[2].feed_forward.w2).weight.mul_(scale)
    with engine_of(model, threads=3) as engine:
        for call in (engine.generate, engine.logits, engine.logprobs):
            with pytest.raises(
                OverflowError, match="infinite, NaN, or beyond what float32 can square"
            ):
                call([1, 2, 3, 4])


def cast(folder, dtype, *names):
    change_weights(
        folder, lambda state: state.update({n: state[n].to(dtype) for n in names or state})
    )


def test_the_automatic_dtype_is_that_of_the_layers(folder, refuses):
    # torch's names of types are accepted, too
    for dtype in ("bfloat16", torch.bfloat16, "bf16"):
        assert Engine.from_pretrained(folder, dtype=dtype).dtype == "bf16"
    cast(folder, torch.bfloat16, "lm_head.weight")
    assert Engine.from_pretrained(folder).dtype == "fp32"
    cast(folder, torch.bfloat16)
    cast(folder, torch.float32, "lm_head.weight")
    with pytest.warns(UserWarning, match=r"lm_head\.weight is fp32 and becomes bf16"):
        assert Engine.from_pretrained(folder, cache=False).dtype == "bf16"
    cast(folder, torch.float32, "model.layers.3.attention.wq.weight")
    wq = r"layers\.3\.attention\.wq\.weight"
    refuses(rf"{wq} is fp32 and layers\.0.* is bf16; choose a dtype", cache=False)
    assert Engine.from_pretrained(folder, dtype="fp32").dtype == "fp32"
