"""Tests of answers that continue the assistant's last message: prefill and continue_final_message."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from laneformer.prompts import PromptEncoder
from tests.laneformer.serve.conftest import in_process
from tests.laneformer.serve.endpoint import (
    GREEDY,
    TALK,
    Endpoint,
    conversations,
    data_of,
    prompt_of,
)
from tests.laneformer.serve.scripted import play
from tests.laneformer.test_chat_template import MISTRAL, OURS, SMOLLM2, TEMPLATES, TOKENS, theirs

ONWARDS = {"add_generation_prompt": False, "continue_final_message": True}
BEGUN = "The quick brown"


def with_final(content, **more) -> list[Any]:
    return [*TALK, {"role": "assistant", "content": content, **more}]


CONTENTS = "Hello", "Hello \n", " Hello", "<think>\nThey", "é 👍", "a " * 99, "Hello, how are you?"


@pytest.mark.parametrize("name", [*OURS, "smollm2", "mistral"])
def test_the_prompt_is_that_of_transformers(name):
    # also where a template strips contents and the last one ends in white space
    templates = {"smollm2": SMOLLM2, "mistral": MISTRAL}
    template = templates.get(name) or (TEMPLATES / f"{name}.jinja").read_text()
    config = {"chat_template": template, **TOKENS}
    prompts = PromptEncoder(Tokenizer(models.BPE({"a": 0}, [])), config)
    for content in CONTENTS:
        messages = with_final(content)
        rendered = prompts.render(messages, add_generation_prompt=False, continue_final=True)
        assert rendered == theirs(template, messages, continue_final_message=True), content


@pytest.fixture(scope="module")
def chat(tiny):
    return conversations(tiny)


@pytest.fixture(scope="module")
def anthropic(tiny):
    return Endpoint(tiny, "/v1/messages", max_tokens=12, **GREEDY)


def prompt_up_to(engine, text) -> list[int]:
    opened = engine.tokenizer.decode(prompt_of(engine, TALK), skip_special_tokens=False)
    return engine.tokenizer.encode(opened + text, add_special_tokens=False).ids


def test_chat_completions_go_on_where_they_are_asked(chat, engine):
    ids = prompt_up_to(engine, BEGUN)
    for content in (BEGUN, [{"type": "text", "text": BEGUN}]):
        body = {
            "messages": with_final(content),
            "max_tokens": 12,
            "return_token_ids": True,
            **ONWARDS,
        }
        answer = chat.choice(**body)
        assert answer["prompt_token_ids"] == ids
        assert answer["message"]["content"] == engine.generate_text(ids, max_new_tokens=12)
    again = chat.choice(messages=with_final(BEGUN), max_tokens=1, return_token_ids=True)
    assert len(again["prompt_token_ids"]) > len(ids) + 2, "a new turn is opened"


def test_messages_go_on(anthropic, engine):
    # only new text is the answer and counts as output
    ids = prompt_up_to(engine, BEGUN)
    text = engine.generate_text(ids, max_new_tokens=12)
    for content in (BEGUN, [{"type": "text", "text": BEGUN}]):
        answer = anthropic.post(messages=with_final(content))
        usage = answer["usage"]
        assert [part["text"] for part in answer["content"]] == [text]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(ids)
        assert usage["output_tokens"] <= 12
    body = {"messages": with_final(BEGUN)}
    stopped = anthropic.post(**body, stop_sequences=[text[3:5]])
    assert stopped["stop_reason"] == "stop_sequence"
    assert stopped["content"][0]["text"] == text[: text.index(text[3:5])]
    events = map(json.loads, data_of(anthropic.ask(**body, stream=True).text))
    assert "".join(event.get("delta", {}).get("text", "") for event in events) == text
    count = anthropic.client.post("/v1/messages/count_tokens", json=body).json()
    assert count == {"input_tokens": len(ids)}
    begun = anthropic.post(messages=with_final(""))["content"]
    assert begun == anthropic.post(messages=TALK)["content"], "an empty turn is one that begins"


@pytest.fixture(scope="module")
def answer_by_script(model_folder):
    with pytest.MonkeyPatch.context() as patch, in_process(model_folder) as client:
        play([("", "it is warm.</think>It is warm."), ("Warm", "It is warm.")], patch)
        yield conversations(client)


def test_a_reasoning_that_was_begun_goes_on(answer_by_script):
    message = answer_by_script.choice(messages=with_final("<think>They say"), **ONWARDS)["message"]
    assert message["reasoning_content"] == "it is warm."
    assert message["content"] == "It is warm."
    message = answer_by_script.choice(messages=with_final("<think>x</think>Warm: "), **ONWARDS)[
        "message"
    ]
    assert "reasoning_content" not in message
    assert message["content"] == "It is warm."
