"""Tools: functions that a model may call, in the form that its own chat template shows."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
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
    """Return the form that calls with these ids show; ChatError where the template refuses them."""
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

    # A conversation with a call is rendered: what stands around the function's name and its
    # arguments is the form. The grammar allows this form alone, and the parser looks for it.
    rendered_answer = render(0)
    one_call = ""
    with contextlib.suppress(ChatError):
        one_call = render(1)
    # This template takes the arguments as a text of JSON
    if as_text := not one_call or str(arguments) in one_call:
        arguments = spelled
        one_call = render(1)
    # What stands around every message of an assistant
    before, _, after = rendered_answer.partition(answer)
    shared = next(n for n in range(len(before), -1, -1) if one_call.startswith(before[:n]))
    match = re.fullmatch(
        f"(?s)(.+?){PROBE_NAME}(.*?){re.escape(spelled)}(.*){re.escape(after)}", one_call[shared:]
    )
    if match is None or not match[1].strip():
        return None
    begin, middle, end = map(replace_ids, match.groups())
    between = None
    with contextlib.suppress(ChatError):
        parts = [replace_ids(part).partition(PROBE_NAME) for part in render(3).split(spelled)]
        # Fewer parts: the template shows the first call alone
        if len(parts) == 4:
            before_name, _, after_name = parts[1]
            numbered_middle = replace_number(middle, after_name)
            if before_name == parts[2][0] and (numbered_middle != middle or after_name == middle):
                between = before_name
            middle = numbered_middle
    if CALL_ID in end or "probed" in f"{begin}{middle}{end}{between}":
        # An id behind its call would come too late
        return None
    return CallForm(begin.lstrip(), middle, between, end, as_text)


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
        if not self.names:
            return None
        form = self.calling.form
        grammars = self.calling.grammars
        literal = grammars.write_literal
        rules = []
        call_rules = []
        for number, function in enumerate(self.functions):
            if function["name"] in self.names:
                what = f"tools[{number}].function.parameters"
                rule = grammars.write_json_rule(
                    close_schema(function["parameters"]), what, self.unused
                )
                rules.append(f"a{number}: {rule}")
                name = function["name"]
                if form is HARMONY:
                    # The function stands in either of two places of a header
                    header = literal(f" to={FUNCTIONS}{name}{CHANNEL}commentary")
                    call_rules.append(f"({literal(form.begin + name)} | {header}) kind a{number}")
                else:
                    call_rules.append(f"{literal(name + form.middle)} a{number}")
        call = f"call: {' | '.join(call_rules)}"
        if form is HARMONY:
            answer = "preamble? (call | final TEXT)" if self.optional else "call"
            return grammars.compile_lark(
                "\n".join([grammars.write_harmony_rules(answer), call, *rules])
            )
        more_calls = (
            f"({literal(form.between)} call)*" if self.parallel and form.between is not None else ""
        )
        calls = f"call {more_calls} {literal(form.end)}"
        marker = form.marker
        rest = f"{literal(form.begin.removeprefix(form.marker))} {calls}"
        token = grammars.write_text_tokens(but=marker)
        # Only calls where they are required, else text up to the first call
        if not self.optional:
            start = f"start: {literal(form.begin)} {calls}"
        elif marker == "{":
            more_calls = f"({token} TEXT)*" if token else ""
            start = f"start: FIRST? {more_calls} | {literal(form.begin)} {calls}\nFIRST: /[^{{](.|\\n)*/"
        else:
            # The marker may come as one token, and as its letters
            before = f"(TEXT {token})*" if token else ""
            single = literal(marker)
            called_by_token = f"| TEXT {single} {rest}" if single.startswith("<[") else ""
            start = f"start: {before} (TEXT | head {rest} {called_by_token})\nhead[lazy]: TEXT {json.dumps(marker)}"
        rules += ["TEXT: /(.|\\n)*/"]
        return grammars.compile_lark("\n".join([start, call, *rules]))


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
