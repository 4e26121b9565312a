"""What all requests of a server share: scheduler, limits, and tokens as text and as bytes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from .. import __version__
from ..engine import Engine
from ..engine.channels import BEGIN, speaks_harmony
from ..engine.options import conversation_defaults
from ..engine.requests import check_ids
from ..prompts import SECRET_CHARS, PromptEncoder
from .bodies import MAX_VALUES, RequestError
from .grammar import Grammars
from .scheduler import Scheduler
from .schema import Sampling
from .tool_calls import ToolCalling

CACHED_TOKENS = 2**16
# Values of JSON in a body: commas of a text count, and some tokens are many commas
VALUES_A_TOKEN = 8
SPARE_VALUES = 2**16
SAMPLED_CHARS = 8  # of a long text, encoded first, for each token of the context
# A byte-level BPE writes these bytes as themselves, and the others as letters from U+0100 on
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_ESCAPED = sorted({*range(256)} - {*_SHOWN})
BYTE_OF = {chr(byte): byte for byte in _SHOWN}
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(_ESCAPED)}


class ServingContext:
    """A model as its clients see it, by its name `model`."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        model: str,
        speculate: int,
        reasoning_budget: int,
    ):
        """Prepare everything that requests need; ValueError for a model without a tokenizer."""
        if engine.tokenizer is None:
            raise ValueError(
                "a server needs a tokenizer, but the model folder has no tokenizer.json; add the model's own"
            )
        self.scheduler = scheduler
        self.model = model
        self.tokenizer = engine.tokenizer
        self.vocab_size = engine.config.vocab_size
        self.context_tokens = engine.config.max_position_embeddings
        self.reasoning_budget = reasoning_budget
        self.harmony = speaks_harmony(engine.tokenizer_config)
        self.reasons = BEGIN in str(engine.tokenizer_config.get("chat_template"))
        self.completion_defaults = {**engine.sampling_defaults, "speculate": speculate}
        self.conversation_defaults = {
            **conversation_defaults(engine.sampling_defaults),
            "speculate": speculate,
        }
        self.prompt_encoder = PromptEncoder(engine.tokenizer, engine.tokenizer_config)
        self.grammars = Grammars(engine.tokenizer, self.vocab_size, engine.eos_ids, self.harmony)
        self.tool_calling = ToolCalling(engine.tokenizer_config, self.grammars)
        # OpenAI's system_fingerprint: equal where the same request and seed give the same answer
        identity = repr(
            (__version__, engine.config, engine.dtype, engine.math, engine.kv_dtype, model)
        )
        self.fingerprint = f"fp_{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        self.encode_token = functools.lru_cache(CACHED_TOKENS)(self._encode_token)
        decoder = engine.tokenizer.decoder
        self._byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._added = {
            i: token.content for i, token in engine.tokenizer.get_added_tokens_decoder().items()
        }
        # No token is longer than its spelling
        longest = max(len(piece.encode()) for piece in engine.tokenizer.get_vocab())
        # A rendered conversation spells control tokens by their secret names, which are longer
        self.max_text_bytes = self.context_tokens * max(longest, SECRET_CHARS)
        self.max_values = min(MAX_VALUES, SPARE_VALUES + VALUES_A_TOKEN * self.context_tokens)

    def check_length(self, text: str, param: str) -> str:
        """Return the text; RequestError where it is too long for the context."""
        # Decide by the size, or by the beginning: encoding 4 MB takes seconds
        size = len(text.encode(errors="replace"))
        start = text[: SAMPLED_CHARS * self.context_tokens]
        too_long = size > self.max_text_bytes
        if not too_long and len(text) > 2 * len(start):
            too_long = len(self.prompt_encoder.encode(start)) > self.context_tokens + SECRET_CHARS
        if too_long:
            raise self.make_context_error(f"which the {size} bytes in the {param} exceed", param)
        return text

    def make_context_error(self, reason: str, param: str) -> RequestError:
        message = f"This model's maximum context length is {self.context_tokens} tokens, {reason}."
        return RequestError(f"{message} Shorten the {param}.", param, "context_length_exceeded")

    def check_ids(self, ids: Sequence[int], name: str, param: str) -> list[int]:
        try:
            return check_ids(ids, self.vocab_size, name)
        except ValueError as error:
            raise RequestError(str(error), param) from None

    def limit_tokens(
        self, request: Sampling, prompts: Sequence[Sequence[int]], limit: int | None, param: str
    ) -> int:
        """Return the limit of new tokens; RequestError where an answer has no room."""
        for i, ids in enumerate(prompts):
            if not self.check_ids(ids, f"{param}[{i}]", param):
                raise RequestError(f"{param}[{i}] has no tokens; send at least one", param)
        # All choices share the limit, so the longest prompt decides
        longest = max(map(len, prompts))
        room = self.context_tokens - longest
        # A limit of 0 only scores the prompt, which may then fill the context
        if room < 0 or (room == 0 and limit != 0):
            reason = (
                f"but you sent {longest} tokens in the {param}, which leaves no room for an answer"
            )
            raise self.make_context_error(reason, param)
        limit = room if limit is None else min(limit, room)
        if request.min_tokens > limit:
            raise RequestError(
                f"min_tokens = {request.min_tokens} exceeds the limit of {limit} tokens",
                "min_tokens",
            )
        return limit

    def spell_token(self, token_id: int) -> str:
        """Return a token as text, or as OpenAI spells bytes that are no text."""
        raw = self.encode_token(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _encode_token(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self.tokenizer.id_to_token(token_id) or ""
        # Three ways in which tokenizers spell bytes: byte-level BPE, <0x0A>, and U+2581 for a
        # space
        if self._byte_level and BYTE_OF.keys() >= set(piece):
            return bytes(BYTE_OF[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()
