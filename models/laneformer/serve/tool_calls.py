"""Tools: functions that a model may call, in the form that its own chat template shows.

The form is a `CallForm` of engine/channels.py, whose `AnswerReader` parses calls in it. Here it is
found in the template (`read_form`), and forced on the model by a grammar (`ToolUse.make_grammar`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..chat import ASSISTANT, SYSTEM, USER, ChatError
from ..engine.channels import (
    CALL_ID,
    CALL_NUMBER,
    CHANNEL,
    FUNCTIONS,
    HARMONY,
    HERMES,
    CallForm,
    speaks_harmony,
)
from ..prompts import ChatTemplate
from .grammar import Grammar, Grammars
from .parts import NO_PARAMETERS, ToolChoice
from .schema import ConversationRequest

PROBE_NAME = "probed_function"
# Nine letters and digits, as Mistral's templates take them
PROBE_IDS = [f"probed00{i}" for i in range(3)]
# For templates that show a call by its id alone, as Kimi K2's
NUMBERED_IDS = [f"{FUNCTIONS}{PROBE_NAME}:{i}" for i in range(3)]
DESCRIPTION = (
    "You can call functions to find what you need. These are the functions, as JSON within tools tags:\n"
    "<tools>\n{}\n</tools>\nTo call one, write its name and its arguments as JSON within tool_call tags:\n"
    '<tool_call>\n{{"name": "<name>", "arguments": {{<arguments>}}}}\n</tool_call>'
)


def read_form(template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> CallForm | None:
    """Return the form in which a template renders calls; None where it has none."""
    # A template that supports tools renders differently with them
    user = {"role": USER, "content": "x"}
    with contextlib.suppress(ChatError):
        if template.render([user], tools=tools) != template.render([user]):
            return probe_calls(template, tools, PROBE_IDS) or probe_calls(
                template, tools, NUMBERED_IDS
            )
    return None


def probe_calls(
    template: ChatTemplate, tools: Sequence[Mapping[str, Any]], ids: Sequence[str]
) -> CallForm | None:
    r"""Return the form that calls with these ids show; ChatError where the template refuses them.

    What stands around the name and the arguments of a call in a rendered conversation is the form:
    the grammar allows no other, and the parser looks for it. For example, a template ends in

        assistant\nprobed_answer<|im_end|>\n                            for an answer without calls
        assistant\n<tool_call>\n{"name": "probed_function", "arguments": {"probed_key":
            "probed_value"}}\n</tool_call><|im_end|>\n                  for one with a call

    `assistant\n` and `<|im_end|>\n` stand around every answer. Of what is left,

        begin   `<tool_call>\n{"name": "`   up to the name
        middle  `", "arguments": `          up to the arguments
        end     `}\n</tool_call>`           behind them
        between `}\n</tool_call>\n<tool_call>\n{"name": "`, from an answer with three calls
    """
    arguments: Any = {"probed_key": "probed_value"}
    answer = "probed_answer"
    spelled = json.dumps(arguments)

    def render(calls: int) -> str:
        # No template writes these names by itself, so they can be found in its output
        function = {"name": PROBE_NAME, "arguments": arguments}
        tool_calls = [
            {"id": call_id, "type": "function", "function": function} for call_id in ids[:calls]
        ]
        fields = {"content": "", "tool_calls": tool_calls} if calls else {"content": answer}
        return template.render(
            [{"role": USER, "content": "x"}, {"role": ASSISTANT, **fields}], tools=tools
        )

    # What stands around every message of an assistant
    before, _, after = render(0).partition(answer)
    one_call = ""
    with contextlib.suppress(ChatError):
        one_call = render(1)
    # This template takes the arguments as a text of JSON
    if as_text := not one_call or str(arguments) in one_call:
        arguments = spelled
        one_call = render(1)
    shared = len(os.path.commonprefix([before, one_call]))  # noqa: RUF071 (of texts, no paths)
    match = re.fullmatch(
        f"(?s)(.+?){PROBE_NAME}(.*?){re.escape(spelled)}(.*){re.escape(after)}", one_call[shared:]
    )
    if match is None or not match[1].strip():
        return None
    begin, middle, end = map(replace_ids, match.groups())
    between = None
    # A template may refuse several calls
    with contextlib.suppress(ChatError):
        between, middle = find_between(render(3).split(spelled), middle)
    if CALL_ID in end or "probed" in f"{begin}{middle}{end}{between}":
        # An id behind its call would come too late
        return None
    return CallForm(begin.lstrip(), middle, between, end, as_text)


def find_between(parts: Sequence[str], middle: str) -> tuple[str | None, str]:
    """Return `between`, None for a model of one call at a time, and `middle`, in which a number may count.

    Args:
        parts: an answer with three calls, split at their arguments.
    """
    # Fewer parts: the template shows the first call alone
    if len(parts) != 4:
        return None, middle
    (between, _, second_middle), (next_between, _, _) = (
        replace_ids(part).partition(PROBE_NAME) for part in parts[1:3]
    )
    numbered_middle = replace_number(middle, second_middle)
    repeats = between == next_between and (numbered_middle != middle or second_middle == middle)
    return between if repeats else None, numbered_middle


def replace_ids(text: str) -> str:
    # The first of Mistral's templates show ids that their models do not write
    return re.sub("probed00.", CALL_ID, re.sub(', "id": "probed00."', "", text))


def replace_number(first: str, second: str) -> str:
    """Return what stands behind a call's name, with CALL_NUMBER for a number that counts."""
    numbers = zip(re.finditer(r"\d+", first), re.finditer(r"\d+", second), strict=False)
    for first_number, second_number in numbers:
        if int(second_number[0]) == int(first_number[0]) + 1:
            return first[: first_number.start()] + CALL_NUMBER + first[first_number.end() :]
    return first


class ToolCalling:
    """How one model calls tools: in its template's form, or else in Hermes's, with instructions."""

    def __init__(self, tokenizer_config: Mapping[str, Any], grammars: Grammars):
        self.grammars = grammars
        self.form = HERMES
        self.describes_tools = True
        self.reads_system = True
        try:
            template = ChatTemplate(tokenizer_config)
        except ValueError:
            return  # rendering the conversation raises the error
        probe: dict[str, Any] = {"name": "x", "description": "x", "parameters": NO_PARAMETERS}
        # A model without a form of its own is told to use that of Hermes
        form = read_form(template, [{"type": "function", "function": probe}])
        if form := HARMONY if speaks_harmony(tokenizer_config) else form:
            self.form = form
            self.describes_tools = False
        try:
            messages = [{"role": SYSTEM, "content": "probed_text"}, {"role": USER, "content": "x"}]
            self.reads_system = "probed_text" in template.render(messages)
        except ChatError:
            self.reads_system = False

    def select_tools(self, request: ConversationRequest) -> ToolUse:
        functions = [tool.function.to_template() for tool in request.tools]
        # A named function is the only one that may be called, and once
        choice = request.tool_choice
        if isinstance(choice, ToolChoice):
            return ToolUse(self, functions, (choice.function.name,), parallel=False)
        names = () if choice == "none" else tuple(function["name"] for function in functions)
        return ToolUse(self, functions, names, request.parallel_tool_calls, choice != "required")


@dataclass(frozen=True)
class ToolUse:
    calling: ToolCalling
    functions: list[dict[str, Any]]
    names: tuple[str, ...]  # of the functions that may be called
    parallel: bool
    optional: bool = False  # text may come instead
    unused: list[str] = field(default_factory=list)  # parameters that no grammar can demand

    @property
    def form(self) -> CallForm | None:
        return self.calling.form if self.names else None

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        if self.calling.describes_tools or not self.names:
            return []
        return [{"type": "function", "function": function} for function in self.functions]

    def translate_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages as the model's template takes calls and results."""
        copies = copy.deepcopy(list(messages))
        if self.calling.describes_tools:
            return self._describe_tools(copies)
        if self.calling.form is HARMONY:
            copies = list(translate_to_harmony(copies))
        for call in [call for message in copies for call in message.get("tool_calls") or ()]:
            if self.calling.form.as_text:
                call["function"]["arguments"] = json.dumps(
                    call["function"]["arguments"], ensure_ascii=False
                )
        return copies

    def _describe_tools(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # The template knows no tools: calls, results and the tools themselves become text
        texts: list[dict[str, Any]] = []
        for is_result, group in itertools.groupby(
            messages, key=lambda message: message["role"] == "tool"
        ):
            if is_result:
                # Results in a row become one message: templates want turns to alternate
                results = [
                    f"<tool_response>\n{message['content']}\n</tool_response>" for message in group
                ]
                texts.append({"role": USER, "content": "\n".join(results)})
                continue
            for message in group:
                if calls := message.pop("tool_calls", None):
                    text = self.calling.form.write([call["function"] for call in calls])
                    message["content"] = "\n".join(filter(None, [message.get("content"), text]))
                texts.append(message)
        if self.names:
            functions = "\n".join(
                json.dumps(function, ensure_ascii=False) for function in self.functions
            )
            role = SYSTEM if self.calling.reads_system else USER
            place = next((message for message in texts if message["role"] == role), None)
            if place is None:
                texts.insert(0, place := {"role": role, "content": ""})
            place["content"] = f"{DESCRIPTION.format(functions)}\n\n{place['content']}".rstrip()
        return texts

    def make_grammar(self) -> Grammar | None:
        """Return the grammar of calls, and of text where it may come instead; None without tools.

        In Lark, `call` is a name with its arguments, and `a0` the arguments of the first tool. With
        one tool `f`, in the form of gpt-oss (`write_harmony_rules` has the other rules):

            start: (analysis TEXT more)? preamble? (call | final TEXT)
            call: (<|channel|> "commentary to=functions.f" | " to=functions.f" <|channel|>
                "commentary") kind a0
            a0: %json {...}
        """
        if not self.names:
            return None
        form = self.calling.form
        grammars = self.calling.grammars
        literal = grammars.write_literal
        rules = []
        call_rules = []
        for number, function in enumerate(self.functions):
            name = function["name"]
            if name in self.names:
                what = f"tools[{number}].function.parameters"
                rule = grammars.write_json_rule(
                    close_schema(function["parameters"]), what, self.unused
                )
                rules.append(f"a{number}: {rule}")
                if form is HARMONY:
                    # The function stands in either of two places of a header
                    header = literal(f" to={FUNCTIONS}{name}{CHANNEL}commentary")
                    call_rules.append(f"({literal(form.begin + name)} | {header}) kind a{number}")
                else:
                    call_rules.append(f"{literal(name + form.middle)} a{number}")
        if form is HARMONY:
            start = grammars.write_harmony_rules(
                "preamble? (call | final TEXT)" if self.optional else "call"
            )
        else:
            start = self._write_start(grammars)
        call = f"call: {' | '.join(call_rules)}"
        return grammars.compile_lark("\n".join([start, call, *rules]))

    def _write_start(self, grammars: Grammars) -> str:
        r"""Return the rules of an answer with calls in any form but harmony.

        Where calls are required, with begin `<tool_call>{"name": "` and end `}</tool_call>`:

            start: "<tool_call>{\"name\": \"" call ("}</tool_call><tool_call>{\"name\": \"" call)*
                "}</tool_call>"

        Where they are optional, text may come up to the first call. With begin `{"name": "`, an
        answer is a call if its first character is "{":

            start: FIRST? | "{\"name\": \"" call "}"
            FIRST: /[^{](.|\n)*/

        With any other begin, its marker (`CallForm.marker`, here <tool_call>) ends the text, as
        letters or as the control token 7:

            start: (TEXT | head "{\"name\": \"" call "}</tool_call>"
                | TEXT <[7]> "{\"name\": \"" call "}</tool_call>")
            head[lazy]: TEXT "<tool_call>"
        """
        form = self.calling.form
        literal = grammars.write_literal
        next_calls = (
            f"({literal(form.between)} call)*" if self.parallel and form.between is not None else ""
        )
        calls = f"call {next_calls} {literal(form.end)}"
        begin = literal(form.begin)
        marker = form.marker
        text_token = grammars.write_text_tokens(but=marker)
        if not self.optional:
            start = f"start: {begin} {calls}"
        elif marker == "{":
            next_text = f"({text_token} TEXT)*" if text_token else ""
            start = f"start: FIRST? {next_text} | {begin} {calls}\nFIRST: /[^{{](.|\\n)*/"
        else:
            text_before = f"(TEXT {text_token})*" if text_token else ""
            calls = f"{literal(form.begin.removeprefix(marker))} {calls}"
            marker_token = literal(marker)
            by_token = f"| TEXT {marker_token} {calls}" if marker_token.startswith("<[") else ""
            start = f"start: {text_before} (TEXT | head {calls} {by_token})\nhead[lazy]: TEXT {json.dumps(marker)}"
        return f"{start}\nTEXT: /(.|\\n)*/"


def translate_to_harmony(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages as gpt-oss's template takes them, with one call a message."""
    results = [message for message in messages if message["role"] == "tool"]
    for message in messages:
        thought = message.pop("reasoning_content", None)
        calls = message.get("tool_calls") or ()
        if calls:
            # The template renders no content next to a call
            message |= {
                "thinking": "\n".join(filter(None, [thought, message["content"]])),
                "content": "",
            }
        elif message["role"] != "tool":
            yield message
        elif message in results:
            results.remove(message)
            yield message
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message["thinking"] = ""
            if result := next(
                (m for m in results if m.get("tool_call_id") == call.get("id")), None
            ):
                results.remove(result)
                yield result


def close_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows the named keys only, unless it says something about others."""
    combined = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"} & parameters.keys()
    closes = not combined and "properties" in parameters
    return {"additionalProperties": False, **parameters} if closes else parameters
