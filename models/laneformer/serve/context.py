"""What all requests of a server share: the scheduler, the model's name and limits, its tokens as
text and as bytes.
"""

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
# of JSON; commas of a text count, and some tokens are many commas
VALUES_A_TOKEN, SPARE_VALUES = 8, 2**16
SAMPLED_CHARS = 8  # for each token of the context: what is encoded first of a long text
# bytes that a byte-level BPE writes as themselves
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _SHOWN]
BYTE_OF = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + i): byte for i, byte in enumerate(_OTHERS)
}


class ServingContext:
    """A model as its clients see it. model: its name."""

    def __init__(
        self, scheduler: Scheduler, engine: Engine, model: str, speculate: int, budget: int
    ):
        """budget: of reasoning. ValueError for a model without a tokenizer."""
        if engine.tokenizer is None:
            raise ValueError(
                "a server needs a tokenizer, but the model folder holds no tokenizer.json"
            )
        self.scheduler, self.model, self.tokenizer = scheduler, model, engine.tokenizer
        self.vocab_size, self.context_tokens = (
            engine.config.vocab_size,
            engine.config.max_position_embeddings,
        )
        self.reasoning_budget = budget
        self.harmony = speaks_harmony(engine.tokenizer_config)
        self.reasons = BEGIN in str(engine.tokenizer_config.get("chat_template"))
        self.completion_defaults = {**engine.sampling_defaults, "speculate": speculate}
        self.conversation_defaults = {
            **conversation_defaults(engine.sampling_defaults),
            "speculate": speculate,
        }
        self.prompts = PromptEncoder(engine.tokenizer, engine.tokenizer_config)
        self.grammars = Grammars(engine.tokenizer, self.vocab_size, engine.eos_ids, self.harmony)
        self.grammars.prepare()  # before requests come, whose streams it would stall
        self.tool_calling = ToolCalling(engine.tokenizer_config, self.grammars)
        identity = repr(
            (__version__, engine.config, engine.dtype, engine.math, engine.kv_dtype, model)
        )
        self.fingerprint = f"fp_{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        self.token_bytes = functools.lru_cache(CACHED_TOKENS)(self._token_bytes)
        decoder = engine.tokenizer.decoder
        self._byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._added = {
            i: token.content for i, token in engine.tokenizer.get_added_tokens_decoder().items()
        }
        longest = max(len(self._token_bytes(i)) for i in range(engine.tokenizer.get_vocab_size()))
        # a rendered conversation spells control tokens by their secret names
        self.max_text_bytes = self.context_tokens * max(longest, SECRET_CHARS)
        self.max_values = min(MAX_VALUES, SPARE_VALUES + VALUES_A_TOKEN * self.context_tokens)

    def check_length(self, text: str, param: str) -> str:
        """The text; RequestError where it is too long for the context, which is told without encoding all of it:
        by its bytes, or by its beginning.
        """
        size, start = (
            len(text.encode(errors="replace")),
            text[: SAMPLED_CHARS * self.context_tokens],
        )
        too_long = size > self.max_text_bytes
        if not too_long and len(text) > 2 * len(start):
            too_long = len(self.prompts.encode(start)) > self.context_tokens + SECRET_CHARS
        if too_long:
            raise self.context_error(f"which the {size} bytes in the {param} exceed", param)
        return text

    def context_error(self, reason: str, param: str) -> RequestError:
        message = f"This model's maximum context length is {self.context_tokens} tokens, {reason}."
        return RequestError(f"{message} Shorten the {param}.", param, "context_length_exceeded")

    def check_ids(self, ids: Sequence[int], name: str, param: str) -> list[int]:
        try:
            return check_ids(ids, self.vocab_size, name)
        except ValueError as error:
            raise RequestError(str(error), param) from None

    def room(
        self, request: Sampling, prompts: Sequence[Sequence[int]], wanted: int | None, param: str
    ) -> int:
        """The limit of new tokens: what is wanted, but no more than the longest prompt leaves of the context.

        RequestError for ids that do not exist, and where it does not fit. Any name of a model is taken: there
        is one, and clients have names in their settings that nobody chose.
        """
        for i, ids in enumerate(prompts):
            if not self.check_ids(ids, f"{param}[{i}]", param):
                raise RequestError(f"{param}[{i}] has no tokens; send at least one", param)
        longest = max(map(len, prompts))
        room = self.context_tokens - longest
        if room < (wanted != 0):
            reason = (
                f"but you sent {longest} tokens in the {param}, which leaves no room for an answer"
            )
            raise self.context_error(reason, param)
        limit = room if wanted is None else min(wanted, room)
        if request.min_tokens > limit:
            raise RequestError(
                f"min_tokens = {request.min_tokens} exceeds the limit of {limit} tokens",
                "min_tokens",
            )
        return limit

    def token_text(self, token_id: int) -> str:
        """A token as text; where its bytes are no text of their own, OpenAI's spelling of them."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self.tokenizer.id_to_token(token_id) or ""
        if self._byte_level and BYTE_OF.keys() >= set(piece):
            return bytes(BYTE_OF[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()
