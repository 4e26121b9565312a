"""Bad folders, bad options and bad prompts: each a ValueError that names what is wrong;
the process never dies.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from laneformer.engine import Cancelled, Engine
from tests.laneformer.engine.assets import (
    engine_of,
    random_ids,
    random_model,
    small_config,
    write_folder,
)

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def engine():
    with engine_of(random_model(small_config())) as engine:
        yield engine


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "hf", random_model(small_config()))


def change_config(folder, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_weights(folder, change) -> None:
    state = load_file(folder / WEIGHTS)
    change(state)
    save_file(state, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"repetition_penality": 1.1}, "did you mean 'repetition_penalty'"),
        ({"speculative": 4}, "did you mean 'speculate'"),
        ({"best_of": 2}, "choose from"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0 is outside 0.01 to 100"),
        ({"frequency_penalty": 2.5}, "frequency_penalty = 2.5 is outside -2.0 to 2.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty = inf must be a finite number"),
        ({"logit_bias": [1, 2]}, "must map token ids to numbers"),
        ({"logit_bias": {3: "much"}}, r"logit_bias\[3\] = 'much'"),
        ({"logit_bias": {3: -101}}, r"logit_bias\[3\] = -101 is outside -100.0 to 100.0"),
        ({"logit_bias": {100: 1.0}}, "logit_bias holds 100"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias must be a flat sequence of integers"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens = 9 exceeds max_new_tokens = 8"),
        ({"speculate": 32}, "speculate = 32 is outside 0 to 31"),
        ({"speculate": True}, "speculate = True must be an integer"),
        ({"reuse_prefix": 1}, "reuse_prefix = 1 must be True or False"),
        ({"logprobs": 2}, "use generate_detailed"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "finite"),
        ({"temperature": "hot"}, "must be a finite number"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "integer"),
        ({"min_p": 2}, "min_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"seed": -1}, "seed"),
        ({"stop_ids": [100]}, "stop_ids holds 100"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
    ],
)
def test_options(engine, options, message):
    with pytest.raises(ValueError, match=message):
        engine.generate([1], **options)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([1, 100], "holds 100"),
        ([-1], "holds -1"),
        ([0.5], "integers"),
        ([[1, 2]], "flat"),
        (["a"], "integers"),
        ([1] * 97, "97 tokens, more than the 96 that fit"),
    ],
)
def test_prompts(engine, ids, message):
    for call in (engine.generate, engine.stream, engine.logits, engine.logprobs):
        if call == engine.logprobs and len(ids) == 97:
            continue  # the last id is only predicted, so one more fits
        with pytest.raises(ValueError, match=message):
            call(ids)


def test_scoring_takes_one_id_more_than_the_context(engine):
    ids = [(7 * i) % 90 for i in range(97)]
    logits = engine.logits(ids[:96]).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(engine.logprobs(ids), expected[np.arange(96), ids[1:]], atol=1e-5)
    with pytest.raises(ValueError, match="98 tokens, more than the 97 that fit"):
        engine.logprobs([1] * 98)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:x"}, "device = 'cuda:x' is unknown"),
        ({"device": "tpu"}, "device = 'tpu'"),
        ({"dtype": "int3"}, "dtype = 'int3'"),
        ({"threads": 0}, "threads"),
        ({"isa": "sse9"}, "isa = 'sse9' cannot run here"),
        ({"math": "quick"}, "math = 'quick' is unknown"),
        ({"math": "bf16"}, "needs bf16 weights"),
        ({"kv_dtype": "int4"}, "kv_dtype = 'int4' is unknown"),
    ],
)
def test_engine_options(folder, options, message):
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(folder, **options)


def test_a_closed_engine_says_so():
    engine = engine_of(random_model(small_config()))
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.generate([1])


def test_closing_during_a_stream_ends_it():
    engine = engine_of(random_model(small_config()))
    stream = engine.stream([1], max_new_tokens=90)
    next(stream)
    engine.close()
    with pytest.raises(Cancelled):
        list(stream)


def test_missing_files(tmp_path, folder):
    with pytest.raises(ValueError, match="not a folder"):
        Engine.from_pretrained(tmp_path / "nowhere")
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="holds no model"):
        Engine.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="is missing"):
        Engine.from_pretrained(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama"}, "architectures = .* is not supported; only LlamaForCausalLM"),
        ({"num_lanes": 5}, "not divisible"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"swa_layers": 3}, "wrong type"),
        ({"norm_eps": "small"}, "wrong type"),
        ({"vocab_size": 200}, "has shape"),
        ({"num_hidden_layers": 6}, "lacks 9 tensors, such as layers.5"),
        ({"num_hidden_layers": 4}, "tensors this architecture has not"),
        ({"eos_token_id": 100}, "eos_token_id 100"),
    ],
)
def test_configs(folder, values, message):
    change_config(folder, **values)
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(folder)


def test_a_misspelt_key_is_refused_and_bookkeeping_is_not(folder):
    change_config(folder, transformers_version="5.0", auto_map={}, torch_dtype="float32", use_cache=True)
    Engine.from_pretrained(folder).close()
    values = json.loads((folder / "config.json").read_text())
    values["broadcast_dely"] = values.pop("broadcast_delay")
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="did you mean 'broadcast_delay'"):
        Engine.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        Engine.from_pretrained(folder)


def test_truncated_weights(folder):
    whole = (folder / WEIGHTS).read_bytes()
    for size in (0, 7, 9, 500, len(whole) // 2, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:size])
        with pytest.raises(ValueError, match="truncated"):
            Engine.from_pretrained(folder)
    (folder / WEIGHTS).write_bytes(b"\x10" + bytes(7) + b"not json at all!" + bytes(64))
    with pytest.raises(ValueError, match="no valid safetensors header"):
        Engine.from_pretrained(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.1.attention.wk.weight", "model.tok_embeddings.weight", "lm_head.weight"]
)
def test_a_nan_weight_is_named(folder, name):
    change_weights(folder, lambda state: state[name].view(-1)[-1].fill_(float("nan")))
    with pytest.raises(ValueError, match=name.removeprefix("model.") + " holds values that are not finite"):
        Engine.from_pretrained(folder)


def test_a_nan_norm_is_named(folder):
    change_weights(folder, lambda state: state["model.norm.weight"][3].fill_(float("inf")))
    with pytest.raises(ValueError, match=r"tensor norm\.weight"):
        Engine.from_pretrained(folder)


def test_a_value_too_large_for_the_asked_dtype(folder):
    change_weights(folder, lambda state: state["model.layers.0.attention.wq.weight"][0, 0, 0].fill_(1e5))
    with pytest.raises(ValueError, match="too large for the dtype"):
        Engine.from_pretrained(folder, dtype="fp16")


def test_wrong_shapes_and_types(folder):
    change_weights(folder, lambda state: state.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(ValueError, match=r"norm\.weight has shape \(47,\)"):
        Engine.from_pretrained(folder)
    change_weights(
        folder, lambda state: state.update({"model.norm.weight": torch.ones(48, dtype=torch.int64)})
    )
    with pytest.raises(ValueError, match="type I64"):
        Engine.from_pretrained(folder)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_conversions_round_as_pytorch_does(dtype):
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    model = random_model(small_config())
    with torch.no_grad():  # subnormal in fp16, and ties
        model.layers[0].attention.wq.weight.view(-1)[:4] = torch.tensor(
            [3e-8, 1e-5, 1 + 2**-9, 1 + 3 * 2**-12]
        )
    ids = random_ids(model.config, 30)
    with engine_of(model, dtype=dtype) as converted:
        seen = converted.logits(ids)
    for name, p in model.named_parameters():
        if not name.endswith("norm.weight"):  # norm scales stay in float32
            p.data = p.data.to(torch_dtype).float()
    with engine_of(model) as rounded:
        np.testing.assert_array_equal(rounded.logits(ids), seen)


def test_sharded_checkpoints(folder):
    state = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with Engine.from_pretrained(folder) as engine, engine_of(random_model(small_config())) as whole:
        np.testing.assert_array_equal(engine.logits([1, 2, 3]), whole.logits([1, 2, 3]))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="files that are missing"):
        Engine.from_pretrained(folder)


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers()),
)


@settings(max_examples=150, deadline=None)
@given(
    ids=st.one_of(anything, st.lists(st.integers(-2, 101), max_size=100)),
    options=st.dictionaries(
        st.sampled_from(["temperature", "top_k", "top_p", "min_p", "seed", "stop_ids"]), anything
    ),
)
def test_any_input_ends_in_tokens_or_an_error(engine, ids, options):
    try:
        tokens = engine.generate(ids, max_new_tokens=3, **options)
    except ValueError:
        return
    assert all(0 <= token < 100 for token in tokens)


@pytest.mark.parametrize("head", ["vocab_parallel", "replicate", "lane"])
@pytest.mark.parametrize("scale", [1e20, 1e30, 1e38])
def test_activations_beyond_float32_are_an_error(head, scale):
    """Else their norms are zeros, and all tokens equally likely."""
    model = random_model(small_config(lm_head_type=head))
    with torch.no_grad():
        (model.lm_head if scale > 1e35 else model.layers[2].feed_forward.w2).weight.mul_(scale)
    with engine_of(model, threads=3) as engine:
        calls = (
            engine.generate,
            engine.logits,
            lambda ids: engine.logprobs([*ids, 4]),
            lambda ids: list(engine.stream(ids)),
            lambda ids: engine.generate(ids, temperature=1.0),
            lambda ids: engine.generate_batch([ids, ids]),
        )
        for call in calls:
            with pytest.raises(OverflowError, match="infinite, NaN, or beyond what float32 can square"):
                call([1, 2, 3])


@pytest.mark.parametrize(
    "change", [lambda e: e["data_offsets"].__setitem__(0, -8), lambda e: e.update(shape=[48.0])]
)
def test_offsets_and_shapes_are_whole_numbers(folder, change):
    raw = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    entry = header["model.norm.weight"]
    change(entry)
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    with pytest.raises(ValueError, match=r"tensor model\.norm\.weight .* not all whole numbers"):
        Engine.from_pretrained(folder)


def test_a_context_that_cannot_fit_is_refused_with_its_bytes(folder):
    with pytest.raises(
        ValueError, match=r"context_tokens = 2147483647 needs [0-9,.]+ GB .* this machine has [0-9,.]+ GB"
    ):
        Engine.from_pretrained(folder, context_tokens=2**31 - 1)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "bf16"])
def test_dtypes_as_torch_spells_them(folder, dtype):
    with Engine.from_pretrained(folder, dtype=dtype) as engine:
        assert engine.dtype == "bf16"
    assert Engine.random(small_config(), dtype="float32").dtype == "fp32"
    with pytest.raises(ValueError, match=r"dtype = torch.float64 is unknown"):
        Engine.from_pretrained(folder, dtype=torch.float64)


def cast(folder, dtype, *names: str) -> None:
    def change(state) -> None:
        for name in names or list(state):
            state[name] = state[name].to(dtype)

    change_weights(folder, change)


def test_the_automatic_dtype_is_that_of_the_layers(folder):
    cast(folder, torch.bfloat16, "lm_head.weight")
    assert Engine.from_pretrained(folder).dtype == "fp32"
    cast(folder, torch.bfloat16)
    cast(folder, torch.float32, "lm_head.weight")
    with pytest.warns(UserWarning, match=r"lm_head\.weight is fp32 and becomes bf16"):
        assert Engine.from_pretrained(folder, cache=False).dtype == "bf16"
    cast(folder, torch.float32, "model.layers.3.attention.wq.weight")
    with pytest.raises(
        ValueError, match=r"layers\.3\.attention\.wq\.weight is fp32 and layers\.0.* is bf16; choose a dtype"
    ):
        Engine.from_pretrained(folder, cache=False)
    assert Engine.from_pretrained(folder, dtype="fp32").dtype == "fp32"
