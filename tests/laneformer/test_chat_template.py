"""Tests of a model's own chat template against Transformers' apply_chat_template, text for text."""

from __future__ import annotations

import functools
import itertools
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from laneformer.chat import ChatError
from laneformer.prompts import ChatTemplate

# of many models, as published; trl is not imported for them
TEMPLATES = Path(str(find_spec("trl").origin)).with_name("chat_templates")
OURS = ("llama3", "llama3_1", "qwen2_5", "qwen3")  # of models that the engine reads
# content is a list there
SEES_PICTURES = ("llava_next", "llava_next_training", "idefics3", "idefics3_training")
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"
)
EVERYTHING = (
    "{%- if tools %}\n    {{- tools | tojson(indent=2) }}\n{%- endif %}\n{{ strftime_now('%Y') }}\n"
    "{% for message in messages %}\n  {% if message.role == 'skip' %}{% continue %}{% endif %}\n"
    "{% generation %}{% set inside = 1 %}{{ message | tojson }}{% endgeneration %}{{ inside is defined }}\n"
    "{% if loop.index == 2 %}{% break %}{% endif %}\n{% endfor %}{{ extra }} {{ documents }} {{ pad_token }}"
)
TURNS = [
    {"role": "user", "content": "Hi <b> & é?"},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "<|im_end|> "},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]
SHAPE = {"type": "object", "properties": {}}
FUNCTION = {"name": "weather", "description": "of a place", "parameters": SHAPE}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": FUNCTION}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def theirs(template: Any, messages: list, **options: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=template, **TOKENS)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@functools.cache
def template_of(template: str) -> ChatTemplate:
    tokens = TOKENS | {"eos_token": {"content": "</s>", "special": True}}
    return ChatTemplate({"chat_template": template, **tokens})


def same(template: str, messages: list, **options: Any) -> bool:
    chat = template_of(template)
    try:
        expected = theirs(template, messages, **options)
    except Exception:
        with pytest.raises(ChatError, match="refuses the conversation"):
            chat.render(messages, **options)
        return False
    assert chat.render(messages, **options) == expected
    return True


@pytest.mark.parametrize("name", OURS)
def test_templates_of_models_that_the_engine_reads(name):
    assert any(compare_templates((TEMPLATES / f"{name}.jinja").read_text()))


@pytest.mark.rotate
def test_templates_of_many_models():
    paths = sorted(TEMPLATES.glob("*.jinja"))
    refusing = [path.stem for path in paths if not any(compare_templates(path.read_text()))]
    assert len(paths) > 40
    assert set(refusing) <= set(SEES_PICTURES), "a template that refuses everything shows nothing"


def compare_templates(template: str) -> list[bool]:
    """Apply `same` to conversations of several lengths, with and without tools."""
    return [
        same(template, messages, add_generation_prompt=len(messages) % 2 == 1, **options)
        for messages in (TURNS, TURNS[:2], SYSTEM + TURNS)
        for options in ({}, {"tools": TOOLS}, {"enable_thinking": False})
    ]


@pytest.mark.parametrize(
    "template", [SMOLLM2, MISTRAL, EVERYTHING], ids=["smollm2", "mistral", "everything"]
)
def test_templates_with_every_filter_and_function(template):
    skipped = [TURNS[0], {"role": "skip", "content": "x"}, *TURNS[1:]]
    rendered = [
        same(template, messages, add_generation_prompt=prompt, tools=tools, extra="more")
        for messages in (TURNS, skipped, SYSTEM + TURNS)
        for prompt, tools in itertools.product((False, True), (None, TOOLS))
    ]
    assert any(rendered)
    assert all(rendered) == (template != MISTRAL)


def test_named_templates():
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
    template = ChatTemplate({"chat_template": templates})
    assert (template.render(TURNS), template.render(TURNS, tools=TOOLS)) == ("plain", "with tools")
    for named_only in ([{"name": "rag", "template": "x"}], None, ""):
        with pytest.raises(ValueError, match="no default chat template"):
            ChatTemplate({"chat_template": named_only})


ESCAPES = (
    "messages.__class__.__mro__",
    "''.__class__.__base__.__subclasses__()",
    "messages.append(1)",
    "raise_exception.__globals__",
    "cycler.__init__.__globals__",
)


@pytest.mark.parametrize("escape", ESCAPES)
def test_templates_cannot_leave_the_sandbox(escape):
    try:
        text = ChatTemplate({"chat_template": "{{ " + escape + " }}"}).render(TURNS)
    except ChatError:
        return
    assert text == "", "what the sandbox forbids is undefined"


def test_templates_that_are_no_jinja_and_jinja_that_is_missing(monkeypatch):
    with pytest.raises(ValueError, match="chat template cannot be read"):
        ChatTemplate({"chat_template": "{% for %}"})
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        ValueError, match=r"needs the package jinja2: pip install 'laneformer\[chat\]'"
    ):
        ChatTemplate({"chat_template": "x"})
