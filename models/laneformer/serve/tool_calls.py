"""Tools: functions that a model may call, with arguments forced by a grammar, and its calls as they stream.

How a model writes a call is asked of its own template: a conversation with a call is rendered, and what
stands around the function's name and its arguments is the form. The grammar allows this form alone, and the
parser looks for it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..chat import ASSISTANT, SYSTEM, USER, ChatError, ChatTemplate
from ..engine.channels import CALL, CHANNEL, ENDS, FUNCTIONS, speaks_harmony
from ..engine.text import StopStrings
from .grammar import NAME, Grammar, Grammars

MAX_TOOLS = 128
FUNCTION = "name", "description", "parameters", "strict"  # fields
OBJECT = json.JSONDecoder(parse_int=str, parse_float=str)  # numbers of any length
PROBE_ID = "probed001"  # nine letters and digits: what Mistral's templates take
PROBE_SAID = f', "id": "{PROBE_ID}"'  # they show it, but the model does not write it
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
DESCRIPTION = (
    "You can call functions to find what you need. These are the functions, as JSON within tools tags:\n"
    "<tools>\n{}\n</tools>\nTo call one, write its name and its arguments as JSON within tool_call tags:\n"
    '<tool_call>\n{{"name": "<name>", "arguments": {{<arguments>}}}}\n</tool_call>'
)


@dataclass(frozen=True)
class CallForm:
    """How calls are written: begin NAME middle ARGUMENTS (between NAME middle ARGUMENTS)* end.

    between: None where the model makes one call at a time. as_text: its template takes arguments as
    a string of JSON.
    """

    begin: str
    middle: str
    between: str | None
    end: str
    as_text: bool = False

    @property
    def marker(self) -> str:
        """What begins a call and no other text; "{" does at the start of an answer only."""
        found = re.match(r".[^\s{\[]*", self.begin)
        return "{" if self.begin[0] == "{" else found[0] if found else self.begin

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        each = [
            f"{call['name']}{self.middle}{json.dumps(call['arguments'], ensure_ascii=False)}"
            for call in calls
        ]
        return self.begin + (self.between or "").join(each) + self.end


HERMES = CallForm(
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    '}\n</tool_call>\n<tool_call>\n{"name": "',
    "}\n</tool_call>",
)


HARMONY = CallForm(*CALL, None, ENDS[1])  # its template shows another spelling of the header


def form_of(template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> CallForm | None:
    """The form in which a template renders calls; None where it knows none, or none with arguments as JSON."""
    name, answer, arguments = "probed_function", "probed_answer", {"probed_key": "probed_value"}
    user, spelled = {"role": USER, "content": "x"}, json.dumps(arguments)

    def rendered(calls: int, given: Any) -> str:
        call = {"type": "function", "function": {"name": name, "arguments": given}}
        made = (
            {"content": "", "tool_calls": [{"id": PROBE_ID, **call}] * calls}
            if calls
            else {"content": answer}
        )
        return template.render([user, {"role": ASSISTANT, **made}], tools=tools)

    try:
        if template.render([user], tools=tools) == template.render([user]):
            return None
        plain, one = rendered(0, None), ""
        with contextlib.suppress(ChatError):
            one = rendered(1, arguments)
        if as_text := not one or str(arguments) in one:
            one = rendered(1, spelled)
    except ChatError:
        return None
    before, _, after = plain.partition(answer)  # around every message of an assistant
    shared = next(n for n in range(len(before), -1, -1) if one.startswith(before[:n]))
    found = re.fullmatch(f"(?s)(.+?){name}(.*?){re.escape(spelled)}(.*){re.escape(after)}", one[shared:])
    if found is None or not found[1].strip():
        return None
    begin, middle, end = (part.replace(PROBE_SAID, "") for part in found.groups())
    between = None
    with contextlib.suppress(ChatError):
        between = rendered(2, spelled if as_text else arguments).split(spelled)[1].replace(PROBE_SAID, "")
        between = between.removesuffix(name + middle)
    return CallForm(begin.lstrip(), middle, between, end, as_text)


class ToolCalling:
    """How one model calls tools: in its template's form, or, where that knows none, as instructions say."""

    def __init__(self, tokenizer_config: Mapping[str, Any], grammars: Grammars):
        self.grammars, self.form, self.described = grammars, HERMES, True
        self.reads_system = True
        try:
            template = ChatTemplate(tokenizer_config)
        except ValueError:
            return  # what needs one says so
        probe: dict[str, Any] = {"name": "x", "description": "x", "parameters": NO_PARAMETERS}
        form = form_of(template, [{"type": "function", "function": probe}])
        if form := HARMONY if speaks_harmony(tokenizer_config) else form:
            self.form, self.described = form, False
        try:
            messages = [{"role": SYSTEM, "content": "probed_text"}, {"role": USER, "content": "x"}]
            self.reads_system = "probed_text" in template.render(messages)
        except ChatError:
            self.reads_system = False

    def use(self, tools: Any = None, choice: Any = None, parallel: bool | None = None) -> ToolUse:
        """What these fields of a request ask for. ValueError names what is wrong."""
        functions = _functions(tools)
        names = [function["name"] for function in functions]
        if isinstance(choice, Mapping) and choice.get("type") == "function":
            name = str((choice.get("function") or {}).get("name"))
            if name not in names:
                raise ValueError(f"tool_choice names {name!r}, but the tools are {names}")
            return ToolUse(self, functions, (name,), False)
        if choice not in (None, "none", "auto", "required"):
            raise ValueError(
                f"tool_choice = {choice!r:.80}: use 'none', 'auto', 'required', or "
                "{'type': 'function', 'function': {'name': ...}}"
            )
        if choice == "required" and not names:
            raise ValueError("tool_choice = 'required' needs tools")
        callable_names = () if choice == "none" else tuple(names)
        return ToolUse(self, functions, callable_names, parallel is not False, choice != "required")


@dataclass(frozen=True)
class ToolUse:
    """Of one request. names: of the functions that may be called; optional: text may come instead."""

    calling: ToolCalling
    functions: list[dict[str, Any]]
    names: tuple[str, ...]
    parallel: bool
    optional: bool = False

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """For the chat template."""
        if self.calling.described or not self.names:
            return []
        return [{"type": "function", "function": function} for function in self.functions]

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages with text as content, and calls with arguments as values, as the template takes them."""
        found = copy.deepcopy([dict(message) for message in messages])
        if self.calling.described:
            return self._without_tools(found)
        if self.calling.form is HARMONY:
            found = list(_in_harmony(found))
        for call in [call for message in found for call in message.get("tool_calls") or ()]:
            if self.calling.form.as_text:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return found

    def _without_tools(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All as text: the tools, calls, and what these gave, results in a row as one message."""
        found: list[dict[str, Any]] = []
        for gave, group in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
            if gave:
                results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
                found.append({"role": USER, "content": "\n".join(results)})
                continue
            for message in group:
                if calls := message.pop("tool_calls", None):
                    written = self.calling.form.written([call["function"] for call in calls])
                    message["content"] = "\n".join(filter(None, [message.get("content"), written]))
                found.append(message)
        if self.names:
            functions = "\n".join(json.dumps(function, ensure_ascii=False) for function in self.functions)
            role = SYSTEM if self.calling.reads_system else USER
            place = next((message for message in found if message["role"] == role), None)
            if place is None:
                found.insert(0, place := {"role": role, "content": ""})
            place["content"] = f"{DESCRIPTION.format(functions)}\n\n{place['content']}".rstrip()
        return found

    def grammar(self) -> Grammar | None:
        """Of the answer: calls alone where they are demanded, else text up to the first; None without tools."""
        if not self.names:
            return None
        form, grammars = self.calling.form, self.calling.grammars
        literal = grammars.literal
        rules, called = [], []
        for number, function in enumerate(self.functions):
            if function["name"] in self.names:
                what = f"tools[{number}].function.parameters"
                rule = grammars.json_rule(_closed(function["parameters"]), what, lenient=True)
                rules.append(f"a{number}: {rule}")
                name = function["name"]
                if form is HARMONY:  # the function stands in either place of a header
                    said = literal(f" to={FUNCTIONS}{name}{CHANNEL}commentary")
                    called.append(f"({literal(form.begin + name)} | {said}) kind a{number}")
                else:
                    called.append(f"{literal(name + form.middle)} a{number}")
        call = f"call: {' | '.join(called)}"
        if form is HARMONY:
            said = "preamble? (call | final TEXT)" if self.optional else "call"
            return grammars.of_lark("\n".join([grammars.in_harmony(said), call, *rules]))
        more = f"({literal(form.between)} call)*" if self.parallel and form.between is not None else ""
        calls = f"call {more} {literal(form.end)}"
        marker, rest = form.marker, f"{literal(form.begin.removeprefix(form.marker))} {calls}"
        token = grammars.text_tokens(but=marker)
        if not self.optional:
            start = f"start: {literal(form.begin)} {calls}"
        elif marker == "{":
            more = f"({token} TEXT)*" if token else ""
            start = f"start: FIRST? {more} | {literal(form.begin)} {calls}\nFIRST: /[^{{](.|\\n)*/"
        else:  # as a token of its own, and as its letters
            before, single = f"(TEXT {token})*" if token else "", literal(marker)
            called_by_token = f"| TEXT {single} {rest}" if single.startswith("<[") else ""
            start = f"start: {before} (TEXT | head {rest} {called_by_token})\nhead[lazy]: TEXT {json.dumps(marker)}"
        rules += ["TEXT: /(.|\\n)*/"]
        return grammars.of_lark("\n".join([start, call, *rules]))

    def parser(self) -> CallParser | None:
        """For the text of one answer, control tokens spelled out."""
        return CallParser(self.calling.form) if self.names else None


class CallParser:
    """An answer's text, in any pieces, as OpenAI's deltas: content, then each call's
    name, then its arguments.

    It relies on the grammar: behind the form's marker there is nothing but calls in that form.
    """

    def __init__(self, form: CallForm):
        self.calls: list[dict[str, Any]] = []  # as in a message
        self._form, self._stops, self._said = form, StopStrings(form.marker), False
        self._deltas: list[dict[str, Any]] = []
        self._reading = self._read()
        next(self._reading)

    @property
    def called(self) -> bool:
        return bool(self.calls)

    def push(self, text: str) -> list[dict[str, Any]]:
        """What is new in the answer."""
        self._deltas = []
        self._reading.send(text)
        return self._deltas

    def finish(self) -> list[dict[str, Any]]:
        """What was held back for a marker that never came."""
        self._deltas = []
        self._say("" if self._stops.found else self._stops.finish())
        return self._deltas

    def _say(self, text: str) -> None:
        self._said |= bool(text)
        self._deltas += [{"content": text}] if text else []

    def _read(self) -> Generator[None, str, None]:
        """The whole answer; waits for text at each `yield`."""
        form, held = self._form, (yield)
        while not self._stops.found:
            only_text = form.marker == "{" and (self._said or held[:1] not in ("", "{"))
            self._say(held if only_text else self._stops.push(held))
            held = self._stops.held if self._stops.found else (yield)
        begin: str | None = form.begin
        while True:
            while begin is None or not held.startswith(begin):  # to the end, behind the last call
                held += yield
            held = held.removeprefix(begin)
            while form.middle not in held:
                held += yield
            name, _, held = held.partition(form.middle)
            call = {"id": uuid.uuid4().hex[: len(PROBE_ID)], "type": "function"}
            self.calls.append({**call, "function": {"name": name, "arguments": ""}})
            self._tell({**call, "function": {"name": name, "arguments": ""}})
            while (end := self._add(held)) is None:
                held = yield
            held, begin = held[end:], form.between

    def _tell(self, call: dict[str, Any]) -> None:
        self._deltas.append({"tool_calls": [{"index": len(self.calls) - 1, **call}]})

    def _add(self, text: str) -> int | None:
        """Add text to the arguments; the length of its part of them once their object is complete."""
        function = self.calls[-1]["function"]
        before, function["arguments"] = function["arguments"], function["arguments"] + text
        end = None
        if "}" in text:
            with contextlib.suppress(ValueError):
                end = OBJECT.raw_decode(function["arguments"])[1] - len(before)
        function["arguments"] = before + text[:end]
        if text[:end]:
            self._tell({"function": {"arguments": text[:end]}})
        return end


def _in_harmony(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """As gpt-oss's template takes them: reasoning as `thinking`, which with a call is all that it says, and
    one call a message, with what it gave behind it.
    """
    gave = [message for message in messages if message["role"] == "tool"]
    for message in messages:
        thought, calls = message.pop("reasoning_content", None), message.get("tool_calls") or ()
        if calls:
            message |= {"thinking": "\n".join(filter(None, [thought, message["content"]])), "content": ""}
        elif message["role"] != "tool":
            yield message
        elif message in gave:
            gave.remove(message)
            yield message
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message["thinking"] = ""
            if result := next((m for m in gave if m.get("tool_call_id") == call.get("id")), None):
                gave.remove(result)
                yield result


def _functions(tools: Any) -> list[dict[str, Any]]:
    """The functions of a request's `tools`, checked, with what templates show of them."""
    if not isinstance(tools, list | None) or len(tools or ()) > MAX_TOOLS:
        raise ValueError(f"tools must be a list of at most {MAX_TOOLS} tools")
    found: list[dict[str, Any]] = []
    for i, tool in enumerate(tools or ()):
        function, where = tool.get("function") if isinstance(tool, Mapping) else None, f"tools[{i}].function"
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise ValueError(f"tools[{i}] must be {{'type': 'function', 'function': {{'name': ...}}}}")
        if unknown := sorted(function.keys() - set(FUNCTION)):
            raise ValueError(f"{where} has {unknown[0]!r}; known are {', '.join(FUNCTION)}")
        name, description, parameters, strict = map(function.get, FUNCTION)
        taken = [other["name"] for other in found]
        if not isinstance(name, str) or not NAME.fullmatch(name) or name in taken:
            raise ValueError(
                f"{where}.name = {name!r:.80} must match {NAME.pattern}, and no other function's name"
            )
        if not isinstance(description, str | None) or not isinstance(strict, bool | None):
            raise ValueError(f"{where}: description must be a text, and strict true or false")
        parameters = NO_PARAMETERS if parameters is None else parameters
        if not isinstance(parameters, dict) or parameters.get("type") != "object":
            raise ValueError(f"{where}.parameters must be a JSON schema of type 'object'")
        found.append({"name": name, "description": description or "", "parameters": parameters})
    return found


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """A schema whose object has no keys but the named ones, where it leaves that open."""
    combined = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"} & parameters.keys()
    closes = not combined and "properties" in parameters
    return {"additionalProperties": False, **parameters} if closes else parameters
