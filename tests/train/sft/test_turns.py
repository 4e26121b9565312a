"""Tests that a conversation with tools has the same ids in training, Transformers and the server."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer, models

from data_mixtures import shards
from laneformer.chat import ChatError
from laneformer.engine.channels import HERMES
from laneformer.engine.text_files import read_texts
from laneformer.hf.export import export
from laneformer.hf.load_folder import import_folder
from laneformer.hf.tokenizer import CHAT_TEMPLATE, TOOLS_TEMPLATE, open_tokenizer
from laneformer.prompts import ChatTemplate, PromptEncoder
from laneformer.serve.conversation import prepare_prompt
from laneformer.serve.grammar import Grammars
from laneformer.serve.schema import ConversationRequest
from laneformer.serve.tool_calls import ToolCalling, read_form
from records.files import read_json
from tests.records.lines import write_lines
from tests.tokenizer_assets import byte_level
from tests.train.sft import chats
from train.sft.__main__ import Arguments, run
from train.sft.conversations import rows
from train.sft.turns import encode

Row = dict[str, Any]
SEQ_LEN, EOS = 2048, "</s>"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "time", "description": "The time, 東京 or <b>"}},
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
]


def call(name: str, number: int = 1, **arguments: Any) -> Row:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def turn(role: str, content: Any, **more: Any) -> Row:
    return {"role": role, "content": content, **more}


def gave(content: str, number: int = 1) -> Row:
    return turn("tool", content, tool_call_id=f"call_{number}")


ASKED = [turn("user", " What is it in Köln? "), turn("assistant", "Sunny.\n")]
BOTH = [call("weather", 1, city="Köln\n\"'"), call("time", 2)]
USED = [
    turn("user", "Weather and time?"),
    turn("assistant", "I look:", tool_calls=BOTH),
    gave(' {"sky": "é"}\n'),
    gave("", 2),
    turn("assistant", None, tool_calls=[call("time")]),
    gave("noon </s>"),
    turn("assistant", "Noon, and sunny."),
    turn("developer", [{"type": "text", "text": "Now"}, {"type": "text", "text": "in French."}]),
    turn("user", "Thanks"),
    turn("assistant", "De rien."),
]
SYSTEM = turn("system", "Be brief.\n")
LONG = [turn(role, f" {role} {n} ") for n in range(40) for role in ("user", "assistant")]
ROWS: list[Row] = [
    {"messages": ASKED},
    {"messages": [SYSTEM, *ASKED]},
    {"messages": [turn("system", " "), *ASKED]},
    {"messages": USED, "tools": TOOLS},
    {"messages": [SYSTEM, *USED], "tools": TOOLS},
    {"messages": [SYSTEM, *USED]},
    {"messages": [SYSTEM, *ASKED], "tools": TOOLS},
    {"messages": USED[:2], "tools": json.dumps(TOOLS)},
]
WRITTEN = [
    'I look:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln\\n\\"\'"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "Noon, and sunny.",
    "De rien.",
]


GOLDEN_KEYS = [
    (78615024705381699698976276913518883881, False, False),
    (78615024705381699698976276913518883881, False, True),
    (229731300698036025609301842921047856948, True, False),
]
GOLDEN_SHA256 = "988d062f60704df706047f2dc27e58a0e72ee856dbd29449c52b87502fcfd755"


@pytest.fixture(scope="module")
def data(data_folder, tmp_path_factory):
    # ROWS among others
    folder = tmp_path_factory.mktemp("tools")
    others = [
        {
            "messages": [
                turn("system", f"You are {n}."),
                turn("user", "Who?"),
                turn("assistant", f"I am {n}."),
            ]
        }
        for n in range(80)
    ]
    path = write_lines(folder / "chat.jsonl", ROWS + others)
    arguments = Arguments(
        (str(path),),
        data_folder / "tokenizer.model",
        folder / "data",
        system_and_tools=True,
        seq_len=SEQ_LEN,
        holdout=0.1,
        workers=1,
    )
    run(arguments)
    return arguments


@pytest.fixture(scope="module")
def hf_folder(data):
    run = data.out.parent / "run"
    run.mkdir()
    # what `describe_attempt` copies
    for path in shards.tokenizer_files(data.out):
        (run / path.name).write_bytes(path.read_bytes())
    (run / "model.json").write_text(json.dumps(chats.CONFIG.to_dict()))
    dcp.save(
        chats.plain_model().float().state_dict(),
        checkpoint_id=run / "checkpoint/step-1",
        no_dist=True,
    )
    export(run / "checkpoint/step-1", data.out.parent / "hf", "float32")
    return data.out.parent / "hf"


@pytest.fixture(scope="module")
def encoder(data_folder):
    return encoder_of(data_folder, TOOLS_TEMPLATE)


def encoder_of(data: Path, template: Path) -> PromptEncoder:
    tokenizer, special = open_tokenizer(data / "tokenizer.model")
    return PromptEncoder(tokenizer, {"chat_template": template.read_text(), **special})


@pytest.fixture(scope="module")
def encodings(encoder):
    return [encode(row, encoder, True, SEQ_LEN, False) for row in ROWS]


def with_values(row: Row) -> tuple[list[Row], Any]:
    row, tools = json.loads(json.dumps(row)), row.get("tools")
    # as Transformers' templates take them: contents as one text, a developer as the system, arguments as values
    for message in row["messages"]:
        message["role"] = {"developer": "system"}.get(message["role"], message["role"])
        if isinstance(message["content"], list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
        for request in message.get("tool_calls", []):
            request["function"]["arguments"] = json.loads(request["function"]["arguments"])
    return row["messages"], json.loads(tools) if isinstance(tools, str) else tools


def test_the_same_ids_in_training_transformers_and_the_server(hf_folder, encodings):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(hf_folder)
    # as the engine reads them
    tokenizer, config, _ = read_texts(hf_folder)
    assert tokenizer is not None
    context = SimpleNamespace(
        prompt_encoder=PromptEncoder(tokenizer, config),
        check_length=lambda text, _: text,
        tool_calling=ToolCalling(config, Grammars(tokenizer, tokenizer.get_vocab_size(), [2])),
    )
    for row, ours in zip(ROWS, encodings, strict=True):
        _, tools = with_values(row)
        # as a client sends it
        request = ConversationRequest.model_validate(
            {"messages": row["messages"], "tools": tools or [], "add_generation_prompt": False}
        )
        assert prepare_prompt(request, context)[1] == ours.ids.tolist()
        # Transformers ends a turn where a text spells "</s>" (docs/decisions/sft.md)
        without_eos = json.loads(json.dumps(row).replace(EOS, ""))
        messages, tools = with_values(without_eos)
        same = encode(without_eos, context.prompt_encoder, True, SEQ_LEN, False)
        out = theirs.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        assert out["input_ids"] == same.ids.tolist()
        assert out["assistant_masks"] == same.loss_mask.astype(int).tolist()


def test_calls_and_answers_are_trained_and_nothing_else(encodings, encoder, data_folder):
    tokenizer, _ = open_tokenizer(data_folder / "tokenizer.model")
    encoded = encodings[4]
    edges = np.flatnonzero(np.diff(encoded.loss_mask.astype(int))) + 1
    pieces = np.split(encoded.ids, edges)
    texts = [tokenizer.decode(piece.tolist(), skip_special_tokens=False) for piece in pieces]
    assert texts[1::2] == [text + EOS for text in WRITTEN]
    context = "".join(texts[::2])
    assert all(
        text in context
        for text in ("Be brief.", "The time", '{"sky": "é"}', "in French.", "assistant")
    )
    without = json.loads(json.dumps(ROWS[4]))
    without["messages"][2]["weight"] = 0
    fewer = encode(without, encoder, True, SEQ_LEN, False)
    assert (fewer.ids == encoded.ids).all()
    assert encoded.loss_mask.sum() - fewer.loss_mask.sum() == len(pieces[1])


def test_the_template_goes_with_the_model_and_the_default_is_the_published_one(
    data, hf_folder, tmp_path
):
    import_folder(hf_folder, tmp_path / "run")
    for folder in (data.out, hf_folder, tmp_path / "run"):
        assert (folder / "chat_template.jinja").read_bytes() == TOOLS_TEMPLATE.read_bytes()
    assert "role `tool`" in (hf_folder / "README.md").read_text()
    before = read_json(data.out / "chat/source.json")
    plain = replace(data, system_and_tools=False, max_dropped=1)
    with pytest.raises(
        ValueError, match=r"rows with tools \(role, tools\), give --system-and-tools"
    ):
        run(replace(plain, max_dropped=0))
    # in the same folder: another template makes the source again
    run(plain)
    assert (data.out / "chat_template.jinja").read_bytes() == CHAT_TEMPLATE.read_bytes()
    after = read_json(data.out / "chat/source.json")
    assert (after["system_ignored"], after["dropped"]) == (83, {"duplicate": 3, "tools": 4})
    assert after["ignored"] == {"system": 83, "tools": 1}
    assert before["content_sha256"] != after["content_sha256"]


def test_without_the_option_ids_and_hashes_are_those_of_before():
    # values from the code before the option existed
    tokenizer = byte_level(["What is it? It is 7. "] * 9, ["<s>", EOS], 300)
    published = PromptEncoder(
        tokenizer, {"chat_template": CHAT_TEMPLATE.read_text(), "eos_token": EOS}
    )
    rows = [{"messages": messages} for messages in (ASKED, [SYSTEM, *ASKED], LONG)]
    encoded = [encode(row, published, False, 600, True) for row in rows]
    assert [(chat.key, chat.cut, "system" in chat.ignored) for chat in encoded] == GOLDEN_KEYS
    content = b"".join(
        chat.ids.astype("<u4").tobytes() + chat.loss_mask.tobytes() for chat in encoded
    )
    assert hashlib.sha256(content).hexdigest() == GOLDEN_SHA256


def test_a_conversation_without_system_and_tools_is_the_published_one(encoder, data_folder):
    # so it is held out by the same hash, whatever the template
    published = encoder_of(data_folder, CHAT_TEMPLATE)
    for messages in (ASKED, LONG):
        row = {"messages": messages}
        ours, theirs = (
            encode(row, encoder, True, 600, True),
            encode(row, published, False, 600, True),
        )
        assert (ours.key, ours.cut) == (theirs.key, theirs.cut)
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()


def test_long_ones_are_cut_behind_answers_and_not_behind_calls(encoder):
    whole = encode(ROWS[4], encoder, True, SEQ_LEN, True)
    assert not whole.cut
    cut = encode(ROWS[4], encoder, True, len(whole.ids) - 1, True)
    assert cut.cut
    first = encode({**ROWS[4], "messages": [SYSTEM, *USED[:7]]}, encoder, True, SEQ_LEN, False)
    assert first.ids.tolist() == cut.ids.tolist()
    with pytest.raises(ChatError, match="the longest that fits has"):
        encode(ROWS[4], encoder, True, len(cut.ids) - 1, True)


def test_tools_are_described_as_by_the_server_for_templates_without_any():
    # One wording of tools, calls and results: the server's own, in the template of before with a
    # system.
    config = {"chat_template": TOOLS_TEMPLATE.read_text(), "eos_token": EOS}
    assert read_form(ChatTemplate(config), TOOLS) == HERMES, "the form that a server forces"
    tokenizer = byte_level(["x"], ["<s>", EOS])
    described = ToolCalling({}, Grammars(tokenizer, tokenizer.get_vocab_size(), [1]))
    for row in ({"messages": USED[:7], "tools": TOOLS}, ROWS[4], ROWS[6]):
        messages, tools = with_values(row)
        request = ConversationRequest.model_validate(
            {"messages": row["messages"], "tools": tools or []}
        )
        use = described.select_tools(request)
        texts = use.translate_messages(
            [{**message, "content": message["content"] or ""} for message in messages]
        )
        assert ChatTemplate(config).render(messages, tools=tools) == ChatTemplate(config).render(
            texts
        )


def struct(name: str, **arguments: Any) -> Row:
    # a call whose arguments are values, not JSON in a text
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


OF_TWO = {
    "type": "object",
    "properties": {"ticker": {"type": "string"}, "days": {"type": "integer"}},
}


def use_tool(name: str, tools: Any = None, **arguments: Any) -> Row:
    called = turn("assistant", "", tool_calls=[struct(name, **arguments)])
    return {"messages": [ASKED[0], called, turn("tool", "9")], "tools": tools}


# fields differ from row to row; keys of a call's arguments in the order of the schema
STRUCTS: list[Row] = [
    use_tool("weather", TOOLS[1:], city="Ulm"),
    use_tool(
        "price",
        [{"type": "function", "function": {"name": "price", "parameters": OF_TWO}}],
        ticker="K",
        days=3,
    ),
    use_tool("price", filter={"low": 1}),
    use_tool("price", filter={"high": [2, 3]}),
    {"messages": [ASKED[0], turn("assistant", "y", weight=0), *ASKED]},
    {
        "conversations": [
            {"from": "human", "value": "x"},
            {"from": "gpt", "value": "y", "train": True},
        ],
        "system": "Be.",
    },
]


def test_rows_of_arrow_are_those_of_json_lines(encoder, tmp_path):
    # Where all structs of a column have all fields: null stands for those that a row has not.
    lines, table = write_lines(tmp_path / "rows.jsonl", STRUCTS), tmp_path / "rows.PARQUET"
    columns = ("messages", "conversations", "tools", "system")
    of_columns = {name: [row.get(name) for row in STRUCTS] for name in columns}
    pyarrow.parquet.write_table(pyarrow.table(of_columns), table)
    assert '"days": null' in json.dumps(pyarrow.parquet.read_table(table).to_pylist())
    pairs = list(zip(rows(str(lines)), rows(str(table)), strict=True))
    assert len(pairs) == len(STRUCTS)
    for ours, theirs in pairs:
        expected, of_arrow = (
            encode(r.value, encoder, True, SEQ_LEN, False) for r in (ours, theirs)
        )
        assert of_arrow.ids.tolist() == expected.ids.tolist(), ours.number
        assert of_arrow.loss_mask.tolist() == expected.loss_mask.tolist()
        assert (of_arrow.key, of_arrow.ignored) == (expected.key, expected.ignored)


def test_values_that_json_has_not_are_refused(encoder):
    called = turn("assistant", "", tool_calls=[struct("time", at=datetime(2026, 1, 1))])
    with pytest.raises(ChatError, match="no valid text or JSON"):
        encode({"messages": [ASKED[0], called, turn("tool", "9")]}, encoder, True, SEQ_LEN, False)


@pytest.mark.parametrize(
    ("row", "tools", "ignored"),
    [
        ({"messages": ASKED}, True, set()),
        ({"messages": [SYSTEM, *ASKED], "tools": TOOLS}, True, set()),
        ({"messages": [SYSTEM, *ASKED], "tools": TOOLS}, False, {"system", "tools"}),
        ({"messages": [ASKED[0], turn("assistant", "4", thinking="2 + 2")]}, True, {"thinking"}),
        ({"messages": [ASKED[0], turn("assistant", "4", thinking="")]}, True, set()),
        (
            {"messages": [ASKED[0], turn("assistant", "no", refusal="No.", audio={"id": 1})]},
            True,
            {"refusal", "audio"},
        ),
        ({"messages": ASKED, "images": ["a.png"], "id": 3, "source": "x"}, False, {"images"}),
        (
            {"messages": [turn("user", "x", note="y"), ASKED[1]], "functions": TOOLS},
            True,
            {"functions"},
        ),
    ],
)
def test_what_the_template_does_not_show_is_named(encoder, data_folder, row, tools, ignored):
    # of a row, and of the assistant's output
    chosen = encoder if tools else encoder_of(data_folder, CHAT_TEMPLATE)
    assert encode(row, chosen, tools, SEQ_LEN, False).ignored == ignored


def test_a_system_beside_the_messages_is_one_of_them(encoder):
    beside, first = (
        encode(row, encoder, True, SEQ_LEN, False)
        for row in ({"messages": ASKED, "system": "Be brief.\n"}, {"messages": [SYSTEM, *ASKED]})
    )
    assert (beside.key, beside.ids.tolist()) == (first.key, first.ids.tolist())


@pytest.mark.parametrize(
    ("message", "tools", "says"),
    [
        ({"tool_calls": BOTH}, False, "give --system-and-tools"),
        ({"function_call": {"name": "time", "arguments": "{}"}}, True, "write it as 'tool_calls'"),
    ],
)
def test_a_reply_is_not_trained_without_its_calls(encoder, message, tools, says):
    messages = [
        ASKED[0],
        {**turn("assistant", "I look:"), **message},
        gave("x"),
        gave("y", 2),
        ASKED[1],
    ]
    with pytest.raises(ChatError, match=says) as refused:
        encode({"messages": messages}, encoder, tools, SEQ_LEN, False)
    assert refused.value.reason == "tools"


@pytest.mark.parametrize(
    ("messages", "tools", "reason", "says"),
    [
        (
            [*USED[:2], gave("x", 2)],
            TOOLS,
            "order",
            "the result of 'call_2', but that of 'call_1' is next",
        ),
        (
            [*USED[:3], USED[-1]],
            TOOLS,
            "order",
            "message 3 is the assistant's, but it is the tool's turn",
        ),
        ([*ASKED, gave("x")], TOOLS, "order", "message 2 is the tool's, but it is the user's turn"),
        ([{**ASKED[0], "tool_calls": BOTH}], TOOLS, "order", "only the assistant does"),
        (
            [ASKED[0], turn("assistant", None)],
            None,
            "empty",
            "message 1, the assistant's, is empty",
        ),
        ([SYSTEM], None, "empty", "no message of a user"),
        ([turn("critic", "x")], None, "role", "allowed are system, user, assistant, tool"),
        (ASKED, [{"name": "time"}], "tools", "they need the form"),
        (ASKED, "{", "tools", "they need the form"),
        (
            [
                ASKED[0],
                turn(
                    "assistant", "", tool_calls=[{"function": {"name": "time", "arguments": "{"}}]
                ),
            ],
            None,
            "tools",
            "a function's name and arguments as JSON",
        ),
        ([turn("user", "half \ud83d"), ASKED[1]], None, "content", "no valid text"),
        (["x"], None, "fields", "message 0 is 'x'"),
    ],
)
def test_what_no_server_could_answer_is_refused(encoder, messages, tools, reason, says):
    with pytest.raises(ChatError, match=says) as refused:
        encode({"messages": messages, "tools": tools}, encoder, True, SEQ_LEN, False)
    assert refused.value.reason == reason


def test_a_token_across_the_edge_of_an_answer_is_refused():
    joining = models.BPE({"<unk>": 0, "\n": 1, "a": 2, "\na": 3}, [("\n", "a")], unk_token="<unk>")
    template = (
        "{% for m in messages %}{{ '\n' }}{% generation %}{{ 'a' }}{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="across the beginning or end of an answer"):
        PromptEncoder(Tokenizer(joining), {"chat_template": template}).encode_training(ASKED)
