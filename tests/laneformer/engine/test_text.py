"""Tests of the engine's text: stop strings that never leak, cancelling, and Ctrl-C."""

from __future__ import annotations

import _thread
import gc
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneformer.engine import StopStrings, TextStream
from tests.laneformer.engine.assets import byte_tokenizer, engine_of, small_model
from tests.laneformer.engine.test_running import while_it_runs

# long requests, slower with every token
LONG = {"max_position_embeddings": 20_000, "swa_layers": (0, 1)}


@pytest.fixture(scope="module")
def engine():
    with engine_of(small_model(vocab_size=264), tokenizer=byte_tokenizer()) as engine:
        yield engine


def cut(text, stops) -> str:
    """Return the text before the stop string that is complete first; of two, before the longer one."""
    # by brute force: the first end at which any stop string is complete
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return text


abc = st.text("abc", min_size=1, max_size=4)


@given(pieces=st.lists(abc, max_size=8), stops=st.lists(abc, max_size=3))
def test_stop_strings_cut_at_the_first_one_however_the_text_is_cut(pieces, stops):
    watcher, output, expected = StopStrings(stops), "", cut("".join(pieces), stops)
    for piece in pieces:
        output += watcher.push(piece)
        assert expected.startswith(output), (
            "text that belongs to a stop string, or comes after it, was shown"
        )
        if watcher.found:
            break
    assert output + watcher.finish() == expected
    assert (watcher.found is not None) == (expected != "".join(pieces))


def test_text_is_held_back_no_longer_than_it_may_begin_a_stop_string():
    watcher = StopStrings(["</end>", "\n\n"])
    # "</e" may begin the first stop string and a line break the second, until "x" and "b" come
    assert [watcher.push(piece) for piece in ("a<", "/e", "x", "\n", "b")] == [
        "a",
        "",
        "</ex",
        "",
        "\nb",
    ]


def test_text_generation_is_the_token_streams_text(engine):
    ids = engine.tokenizer.encode("ab é").ids
    text = TextStream(engine.tokenizer, ids)
    expected = "".join([*map(text.push, engine.generate(ids, max_new_tokens=40)), text.finish()])
    assert engine.generate_text("ab é", max_new_tokens=40) == expected
    assert "".join(engine.stream_text("ab é", max_new_tokens=40)) == expected


def test_stop_strings_end_the_request_across_token_borders(engine):
    # one character a token
    bias = {engine.tokenizer.token_to_id(token): 30.0 for token in ("a", "b", " ")}
    options = {"max_new_tokens": 60, "temperature": 1.0, "seed": 1, "logit_bias": bias}
    whole, rng = engine.generate_text("a", **options), random.Random(2)
    assert set(whole) <= set("ab ")
    for _ in range(20):
        start = rng.randrange(len(whole) - 4)
        stop = whole[start : start + rng.randrange(1, 5)]
        pieces = list(engine.stream_text("a", stop=["never", stop], **options))
        assert "".join(pieces) == whole[: whole.index(stop)]
        assert not any(stop in "".join(pieces[:i]) for i in range(len(pieces) + 1))
        assert engine.statistics.passes <= 60


def test_a_stop_string_cancels_what_is_left():
    with engine_of(small_model(vocab_size=264, **LONG), tokenizer=byte_tokenizer()) as engine:
        bias = {engine.tokenizer.token_to_id("a"): 100.0}
        assert engine.generate_text("b", stop="aaa", max_new_tokens=19_000, logit_bias=bias) == ""
        assert engine.statistics.passes < 19_000, "the request ran to its end"
        assert engine.generate_text("b", max_new_tokens=2, logit_bias=bias) == "aa"


def test_text_needs_text_or_ids_and_a_tokenizer(engine):
    ids = engine.tokenizer.encode("a b").ids
    assert engine.generate_text(ids, max_new_tokens=9) == engine.generate_text(
        "a b", max_new_tokens=9
    )
    for stop in ("", [""], ["a", 3], [None]):
        with pytest.raises(ValueError, match="a stop string is a text of at least one character"):
            engine.stream_text("a", stop=stop)
    with pytest.raises(
        ValueError, match="prompt must be a flat sequence of integers, not NoneType"
    ):
        engine.generate_text(None)
    with engine_of(small_model()) as bare, pytest.raises(ValueError, match=r"tokenizer\.json"):
        bare.generate_text("a")


@pytest.fixture(scope="module")
def slow_engine():
    with engine_of(small_model(**LONG)) as engine:
        yield engine


def test_an_iterator_may_be_closed_at_any_token(slow_engine):
    expected = slow_engine.generate([7], max_new_tokens=12)
    for count in range(12):
        stream = slow_engine.stream([7], max_new_tokens=19_000)
        assert [next(stream) for _ in range(count)] == expected[:count]
        stream.close()
        assert slow_engine.statistics.passes < 19_000, "the request ran to its end"
    for count in (0, 5):
        stream = slow_engine.stream([7], max_new_tokens=19_000, speculate=8)
        assert [next(stream) for _ in range(count)] == expected[:count]
        del stream  # forgotten, not closed
    assert slow_engine.generate([7], max_new_tokens=12) == expected


def test_a_stream_keeps_its_tokens_when_its_request_is_done_but_not_read():
    with engine_of(small_model()) as engine:
        expected = engine.generate([1], max_new_tokens=5)
        stream = engine.stream([1], max_new_tokens=5)
        first = next(stream)
        # its request is still open, although all tokens may be there
        with pytest.raises(RuntimeError, match="busy"):
            engine.generate([2])
        assert [first, *stream] == expected
        engine.generate([2], max_new_tokens=2)


def interrupt(engine, call) -> float:
    """Return the CPU seconds from Ctrl-C until the call ended."""
    pressed_s = []

    def press():
        pressed_s.append(time.process_time())
        _thread.interrupt_main()

    gc.disable()  # hypothesis hooks a callback into it, which would swallow the interrupt
    pressing = while_it_runs(engine, press)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        gc.enable()
        pressing.join()
    return time.process_time() - pressed_s[0]


def test_ctrl_c_ends_every_call_soon(slow_engine):
    ids = [i % 90 for i in range(15_000)]
    expected = slow_engine.generate([3], max_new_tokens=4)
    calls = (
        lambda: slow_engine.generate([3], max_new_tokens=19_000),
        lambda: list(slow_engine.stream([3], max_new_tokens=19_000)),
        lambda: slow_engine.logprobs(ids),
    )
    for call in calls:
        # CPU seconds; to its end each call would take many times that
        assert interrupt(slow_engine, call) < 3.0
        assert slow_engine.generate([3], max_new_tokens=4) == expected


def test_streamed_pieces_add_up_and_never_hold_half_a_character():
    tokenizer, rng = byte_tokenizer(), random.Random(0)
    texts = ["".join(rng.choice("ab é漢🙂\n") for _ in range(20)) for _ in range(50)]
    # a replacement character in the text itself must not be taken for half a character
    for text in [*texts, "\ufffd😀", "a\ufffd\ufffdé😀\ufffd", "😀\ufffd", "\ufffd" * 5, "é\ufffd"]:
        ids = tokenizer.encode(text).ids
        stream = TextStream(tokenizer, ids[:1] if text[0] in "ab " else [])
        prompt = tokenizer.decode(stream.ids)
        pieces = [stream.push(token) for token in ids[len(stream.ids) :]]
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
        assert prompt + "".join(pieces) + stream.finish() == text


def test_bytes_that_form_no_character_appear_at_the_end_and_are_not_held_back_for_ever():
    tokenizer = byte_tokenizer()
    # the first of two bytes
    half = tokenizer.encode("é").ids[0]
    stream = TextStream(tokenizer, [])
    assert (stream.push(half), stream.finish()) == ("", "\ufffd")
    stream = TextStream(tokenizer, [])
    output = "".join(stream.push(half) for _ in range(50))
    assert len(output) >= 40
    assert len(output + stream.finish()) == 50
