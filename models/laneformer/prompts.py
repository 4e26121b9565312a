"""Prompts as token ids, in which only a chat template writes control tokens, never a user's text."""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .chat import ChatError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A template's variable, which stands where {% generation %} begins and ends
GENERATION_MARK = "generation_mark"
STEP_CHARS = 2**16  # of one search, during which no other thread runs
# Digits survive what templates do with text: trim, upper, tojson
SECRET_DIGITS = 40
SECRET_CHARS = SECRET_DIGITS + 3  # of a secret name, at most


class PromptEncoder:
    """A model's tokenizer and chat template; neither is changed."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_config: Mapping[str, Any]):
        added = tokenizer.get_added_tokens_decoder().values()
        names = sorted((token.content for token in added if token.special), key=len, reverse=True)
        # Control tokens have secret names here, and a template sees its data with the first character
        # of every spelled control token replaced by digits: what spells one in the rendered text was
        # written by the template.
        # A secret name begins and ends as the name does: a tokenizer that looks at the neighbours of
        # a control token then reads it in the same places. Elsewhere the name is letters, as in
        # Transformers.
        self._secret = {name: f"{name[0]}{draw_digits()}{name[-1]}" for name in names}
        self._name = {secret: name for name, secret in self._secret.items()}
        # A GGUF file may say that this token begins every conversation, whatever its template writes
        self._bos = self._secret.get(tokenizer_config.get("conversation_bos", ""), "")
        self._mark = draw_digits()
        self._edge = draw_digits()
        self._tokenizer = rename_control_tokens(tokenizer, self._secret)
        self._ids = {self._tokenizer.token_to_id(secret) for secret in self._name}
        self._always_read = all(self._ids & {*self.encode(f"a{secret}a")} for secret in self._name)
        any_name = "|".join(map(re.escape, names)) or "(?!)"
        self._written = re.compile(any_name)
        self._begun = re.compile(f"(?s)(?=(?:{any_name}))(.)")  # overlapping ones, too
        self._longest = max(map(len, names), default=0)
        self._hidden = re.compile(self._mark + r"(\d{7})")
        self._template: ChatTemplate | None = None
        self.missing = ""  # why there is no template
        try:
            self._template = ChatTemplate(tokenizer_config)
        except ValueError as error:
            self.missing = str(error)

    def encode_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; what spells a control token in it is read as letters.

        Args:
            add_special_tokens: put the tokenizer's own begin-of-text token in front.
        """
        # Of the library's methods this one lets other threads run
        (encoded,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoded.ids

    def find_control_tokens(self, text: str) -> list[str]:
        """Return the control tokens that a text spells, which the model reads as letters."""
        return list(dict.fromkeys(name[0] for name in self._find(self._written, text)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> str:
        """Return the conversation as text for `encode`; ChatError where the template refuses it."""
        if self._template is None:
            raise ValueError(self.missing)
        if continue_final:
            *messages, last = messages
            messages.append({**last, "content": f"{last['content']}{self._edge} "})
        data = self._hide_control_tokens(
            {"messages": list(messages), "tools": list(tools) or None, **(variables or {})}
        )
        try:
            rendered = self._template.render(
                data.pop("messages"), **data, add_generation_prompt=add_generation_prompt
            )
        except ChatError as error:
            raise ChatError(error.reason, self._restore(str(error))) from None
        if continue_final:
            rendered = self._cut_at_edge(rendered)
        restored = self._restore(
            self._replace(self._written, rendered, lambda name: self._secret[name[0]])
        )
        text = self._bos + restored.removeprefix(self._bos)
        return text if self._always_read else self._spell_unread(text)

    def encode_training(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a conversation, and the ranges of ids inside {% generation %} blocks.

        Raises:
            ValueError: also where a token crosses the edge of a block.
        """
        parts = self.render(messages, tools, False, {GENERATION_MARK: self._edge}).split(self._edge)
        encoded = self._tokenizer.encode("".join(parts), add_special_tokens=False)
        starts, ends = [[place[i] for place in encoded.offsets] for i in (0, 1)]
        edges = []
        for edge in accumulate(map(len, parts[:-1])):
            edges.append(token := bisect_left(starts, edge))
            if token and ends[token - 1] > edge:
                raise ValueError(
                    f"the tokenizer joins {encoded.tokens[token - 1]!r} across the beginning or end of an answer, so "
                    "it could not be told what is trained. Use one whose pre-tokenizer keeps line breaks apart"
                )
        return encoded.ids, list(zip(edges[::2], edges[1::2], strict=True))

    def encode(self, rendered: str) -> list[int]:
        """Return the ids of what `render` returned, or of a part of it."""
        return self.encode_text(rendered, add_special_tokens=False)

    def _cut_at_edge(self, rendered: str) -> str:
        beginning, edge, rest = rendered.rpartition(self._edge)
        if not edge:
            reason = "the model's chat template does not show the end of the last message, so it cannot be continued"
            raise ChatError("content", reason)
        # The template strips contents if it has removed the space behind the edge
        return beginning if rest.startswith(" ") else beginning.rstrip()

    def _hide_control_tokens(self, value: Any) -> Any:
        """Return the value with no control token spelled in any of its texts."""
        if isinstance(value, str):
            return self._replace(
                self._begun, value, lambda first: f"{self._mark}{ord(first[1]):07d}"
            )
        if isinstance(value, Mapping):
            return {
                self._hide_control_tokens(name): self._hide_control_tokens(entry)
                for name, entry in value.items()
            }
        return (
            [self._hide_control_tokens(entry) for entry in value]
            if isinstance(value, list)
            else value
        )

    def _spell_unread(self, text: str) -> str:
        """Return the text with control tokens as letters where the tokenizer reads none."""
        # Some have to be words by themselves, or to stand behind what the normalizer prepends
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        places = zip(encoded.ids, encoded.offsets, strict=True)
        read = [place for token, place in places if token in self._ids]

        def spell(secret: re.Match[str]) -> str:
            is_read = any(begin <= secret.start() and secret.end() <= end for begin, end in read)
            return secret[0] if is_read else self._name[secret[0]]

        return re.sub("|".join(map(re.escape, self._name)), spell, text)

    def _replace(
        self, names: re.Pattern[str], text: str, by: Callable[[re.Match[str]], str]
    ) -> str:
        """Return `names.sub(by, text)`, in steps between which other threads run."""
        parts = []
        end = 0
        for match in self._find(names, text):
            parts += [text[end : match.start()], by(match)]
            end = match.end()
        return "".join([*parts, text[end:]])

    def _find(self, names: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        place = 0
        while place < len(text):
            step = place + STEP_CHARS
            match = names.search(text, place, step + self._longest)
            if match is None or match.start() >= step:
                place = step
            else:
                yield match
                place = match.end()

    def _restore(self, text: str) -> str:
        return self._hidden.sub(lambda digits: chr(int(digits[1])), text)


def draw_digits() -> str:
    return str(10**SECRET_DIGITS + secrets.randbelow(10**SECRET_DIGITS))


def rename_control_tokens(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """Return a copy with other names for control tokens, so that no text of a user spells them."""

    def rename(value: Any) -> Any:
        if isinstance(value, str):
            return names.get(value, value)
        if isinstance(value, list):
            return [rename(entry) for entry in value]
        if isinstance(value, dict):
            return {names.get(name, name): rename(entry) for name, entry in value.items()}
        return value

    description = json.loads(tokenizer.to_str())
    merges = description["model"].pop("merges", None)
    description = rename(description)
    if merges is not None:
        # The merges of the BPE must not produce a control token from text either
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in merges]
        description["model"]["merges"] = [
            [a, b] for a, b in pairs if names.keys().isdisjoint((a, b, a + b))
        ]
    copy = type(tokenizer).from_str(json.dumps(description))
    copy.no_truncation()
    copy.no_padding()
    return copy


class ChatTemplate:
    """The chat template of a tokenizer_config.json or GGUF file, rendered as by Transformers."""

    def __init__(self, tokenizer_config: Mapping[str, Any]):
        """Compile the template; ValueError where there is none or it cannot be read."""
        templates = tokenizer_config.get("chat_template") or {}
        if isinstance(templates, list):  # several, by name
            templates = {entry["name"]: entry["template"] for entry in templates}
        if isinstance(templates, str):
            templates = {"default": templates}
        if "default" not in templates:
            raise ValueError(
                f"the model has no default chat template (named ones: {sorted(templates)}); give plain text"
            )
        environment, template_error = _environment()
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in templates.items()
            }
        except template_error as error:
            raise ValueError(f"the model's chat template cannot be read: {error}") from None
        self._tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in tokenizer_config.items()
            if name.endswith("_token") and token
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the conversation as text; ChatError where the template refuses it."""
        # As in Transformers, tools choose the template of this name
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        values = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            **self._tokens,
            **variables,
            "add_generation_prompt": add_generation_prompt,
        }
        # Templates are third-party code: they see plain JSON values only, in Jinja's sandbox
        json_values = json.loads(json.dumps(values))
        try:
            return self._templates[name].render(json_values)
        except Exception as error:  # whatever third-party code raises on a client's data
            raise ChatError(
                "template", f"the model's chat template refuses the conversation: {error}"
            ) from None


def _environment() -> tuple[Any, type[Exception]]:
    """Return Jinja's environment as Transformers sets it up, and its class of errors."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        raise ValueError(
            "a chat template needs the package jinja2: pip install 'laneformer[chat]'"
        ) from None

    class Generation(Extension):
        """{% generation %}: what the model is trained to write, a block between two marks."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.Name(GENERATION_MARK, "load")]) for _ in range(2))
            return [node.set_lineno(line) for node in (begin, nodes.Scope(body), end)]

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own filter escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment, TemplateError
