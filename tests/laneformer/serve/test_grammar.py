"""Tests that answers under a grammar, from a random model at temperature 1, parse and are valid."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from laneformer.serve.grammar import MAX_SCHEMA_BYTES, Grammar, Grammars
from tests.laneformer.serve.endpoint import parse_table
from tests.laneformer.serve.grammar_assets import (
    TOKENIZERS,
    batch_of,
    draw_answer,
    grammars,
    list_allowed,
    text_of,
)

SEEDS = 3
# RFC 3339 has a year 0, Python has not: so a date begins with 1 or 2
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())


def valid(kind: str, ids: list[int], schema: dict[str, Any]) -> bool:
    try:
        value = json.loads(text_of(kind, ids))
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_answer_is_valid(kind):
    with batch_of(kind) as batch:
        for name, schema in SCHEMAS.items():
            answers = [
                draw_answer(batch, grammars(kind).compile_schema(schema, "s"), seed=seed)
                for seed in range(SEEDS)
            ]
            # the length limit may cut an answer, which then is no JSON
            ended = [ids for ids, reason in answers if reason == "stop"]
            assert ended, name
            assert all(valid(kind, ids, schema) for ids in ended), name


class Shifted(Grammar):
    def mask(self, index: int) -> np.ndarray:
        return np.roll(super().mask(index), 1)


class Late(Grammar):
    """A grammar that gives the mask of the previous token."""

    last: np.ndarray | None = None

    def mask(self, index: int) -> np.ndarray:
        now = super().mask(index)
        before = self.last
        self.last = now
        return now if before is None else before


class Forgetful(Grammar):
    def accept(self, token_id: int):
        pass


@pytest.mark.parametrize("planted", [Shifted, Late, Forgetful])
def test_planted_faults_show(planted):
    for seed in range(3):
        grammar = grammars().compile_schema(SCHEMAS["flat"], "schema")
        # the fault replaces a method of the compiled grammar
        grammar.__class__ = planted
        with batch_of() as batch:
            try:
                ids, reason = draw_answer(batch, grammar, seed=seed, max_new_tokens=200)
            except (AssertionError, RuntimeError):
                continue  # the grammar itself saw it
        assert reason != "stop" or not valid("bytes", ids, SCHEMAS["flat"])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_complete_answer_leaves_only_the_ends(kind):
    compiler = grammars(kind)
    grammar = compiler.compile_schema({"const": True}, "schema")
    size = compiler.tokenizer.get_vocab_size()
    assert compiler.vocab_size > size, "the embedding table has rows without a token"
    for index in range(20):
        ids = list_allowed(grammar.mask(index))
        assert max(ids) < size
        if ids == set(compiler.eos_ids):
            break
        grammar.accept(min(ids))
    else:
        pytest.fail("the answer never ended")
    grammar.accept(compiler.eos_ids[1])
    assert list_allowed(grammar.mask(index + 1)) == set(compiler.eos_ids), (
        "with ignore_eos an answer goes on"
    )
    grammar.accept(compiler.eos_ids[0])
    grammar.mask(index + 2)


def test_a_table_smaller_than_the_tokenizer():
    compiler = grammars()
    small = Grammars(compiler.tokenizer, 300, compiler.eos_ids)
    mask = small.compile_lark("start: /(.|\\n)*/").mask(0)
    assert mask.shape == (10,)
    assert max(list_allowed(mask)) == 299


def test_white_space_is_bounded():
    grammar = grammars().compile_schema({"type": "object"}, "schema")
    compiler = grammars()
    # tokens of white space alone
    blank = {
        i
        for i in range(compiler.tokenizer.get_vocab_size())
        if not compiler.tokenizer.decode([i]).strip(" \n")
    }
    for index in range(60):
        ids = list_allowed(grammar.mask(index))
        if index and not (spaces := sorted(ids & blank - set(compiler.eos_ids))):
            return
        grammar.accept(spaces[0] if index else min(ids))
    pytest.fail("white space without end")


BAD = r"""
{"type": "object", "properties": {"a": {"type": "strin"}}} | s\.properties\.a: Invalid type: strin
{"anyOf": [{"type": "null"}, {"type": "string", "format": "zip"}]} | s\.anyOf\[1\]: Unknown format: zip
{"type": "string", "pattern": "(?=a)b"} | s: regex parse error
{"type": "array", "items": {"if": {}}} | s\.items: Unimplemented keys: \["if"\]
{"$ref": "#/$defs/x"} | Pointer '/\$defs/x' does not exist
{"$ref": "#"} | the schema allows no answer
{"type": "integer", "multipleOf": 99999989} | least common multiple
{"type": "number", "multipleOf": 1.2345678e-300} | least common multiple
{"const": "\ud800"} | hex escape
null | s = None must be a JSON schema
"""
LONG = {"enum": ["x" * MAX_SCHEMA_BYTES]}
DEEP = functools.reduce(lambda inner, _: {"items": inner}, range(3000), {})
ROWS = [*parse_table(BAD), (LONG, "at most 65,536"), (DEEP, "s is nested too deeply")]


@pytest.mark.parametrize(("schema", "message"), ROWS, ids=range(len(ROWS)))
def test_bad_schemas_are_refused_with_their_place(schema, message):
    with pytest.raises(ValueError, match=message) as error:
        grammars().compile_schema(schema, "s")
    assert len(str(error.value)) < 700


def test_a_schema_cannot_change_how_it_is_compiled():
    lenient = {"type": "string", "format": "zip", "x-guidance": {"lenient": True}}
    with pytest.raises(ValueError, match="Unknown format"):
        grammars().compile_schema(lenient, "schema")


def test_models_without_an_end_and_machines_without_the_package(monkeypatch):
    compiler = grammars()
    with pytest.raises(ValueError, match="end-of-text id"):
        Grammars(compiler.tokenizer, compiler.vocab_size, ()).compile_schema({}, "schema")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'laneformer\[grammar\]'"):
        Grammars(compiler.tokenizer, compiler.vocab_size, compiler.eos_ids).compile_schema(
            {}, "schema"
        )
