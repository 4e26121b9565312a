"""Tests that any input gives a result or a ValueError: no crash, no hang, and the engine still works."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from laneformer.engine import GenerationOptions
from laneformer.engine.options import RANGES
from laneformer.engine.requests import make_request
from tests.laneformer.engine.assets import byte_tokenizer, engine_of, small_model

NAMES = [
    field.name for field in dataclasses.fields(GenerationOptions) if field.name != "max_new_tokens"
]
pytestmark = pytest.mark.job  # hundreds of examples
LIMITS = {"deadline": 20_000, "max_examples": 150}  # ms: a hang fails


@pytest.fixture(scope="module")
def engine():
    with engine_of(small_model(vocab_size=264), threads=2, tokenizer=byte_tokenizer()) as engine:
        engine.expected = engine.generate([1, 2, 3], max_new_tokens=4, reuse_prefix=False)
        yield engine


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.lists(st.integers(-3, 300), max_size=5),
    st.dictionaries(st.integers(-3, 300), st.floats(), max_size=3),
    st.sampled_from([np.int64(3), np.float32(0.5), np.array([1, 2]), np.array(7), object()]),
)


def valid(name) -> st.SearchStrategy:
    # small numbers keep a generation short
    if name in RANGES:
        kind, low, high = RANGES[name]
        return (
            st.integers(int(low), int(min(high, 40)))
            if kind is int
            else st.floats(low, min(high, 100.0))
        )
    if name == "logit_bias":
        return st.dictionaries(st.integers(0, 263), st.floats(-100, 100), max_size=4)
    ids = name in ("stop_ids", "prediction")
    return st.lists(st.integers(0, 263), max_size=4) if ids else st.booleans()


good_options = st.fixed_dictionaries({}, optional={name: valid(name) for name in NAMES})
any_options = st.dictionaries(st.sampled_from([*NAMES, "seed ", "stop"]), anything, max_size=4)
prompts = st.lists(st.integers(0, 263), min_size=1, max_size=96)
any_prompt = st.one_of(anything, prompts, st.lists(st.integers(-2, 265), max_size=100))


def still_works(engine):
    assert engine.generate([1, 2, 3], max_new_tokens=4) == engine.expected


@settings(**LIMITS)
@given(prompt=any_prompt, options=st.one_of(any_options, good_options), data=st.data())
def test_any_generation_ends_in_tokens_or_an_error(engine, prompt, options, data):
    calls = (
        engine.generate,
        engine.generate_detailed,
        lambda p, **o: list(engine.stream_detailed(p, **o)),
        lambda p, **o: engine.generate_text(p, **o),
    )
    with contextlib.suppress(ValueError):
        data.draw(st.sampled_from(calls))(prompt, **{"max_new_tokens": 3, **options})
    still_works(engine)


@settings(**LIMITS)
@given(
    ids=any_prompt,
    options=st.dictionaries(st.sampled_from(["top", "start", "reuse_prefix"]), anything),
)
@example(ids=[0], options={"top": False})  # no number, though it stands for one
def test_any_scoring_ends_in_numbers_or_an_error(engine, ids, options):
    try:
        scores = engine.logprobs(ids, **options)
    except ValueError:
        pass
    else:
        logprobs = scores if isinstance(scores, np.ndarray) else scores.logprobs
        assert len(logprobs) == len(ids) - int(options.get("start", 1))
        assert (logprobs <= 0).all()
    still_works(engine)


REQUEST = make_request(GenerationOptions(max_new_tokens=2), [1, 2], 264)
FIELDS = [field.name for field in dataclasses.fields(REQUEST)]


@settings(**LIMITS)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), anything, max_size=3))
def test_the_compiled_module_checks_its_arguments_itself(engine, changes):
    # sizes and ids that a mistake in Python could send are refused
    decoder = engine._open()
    if isinstance(changes.get("max_new_tokens"), int):
        return  # long, but no mistake
    with contextlib.suppress(ValueError, RuntimeError, TypeError):
        (ticket,) = decoder.join([dataclasses.replace(REQUEST, **changes)])
        if changes.get("masked"):
            decoder.leave(ticket)
        while decoder.running:
            for result in decoder.collect(0.1):
                assert all(0 <= i < 264 for i in result.tokens)
    still_works(engine)
