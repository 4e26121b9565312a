"""lm-eval models: our engine in this process, or any OpenAI-compatible endpoint.

`EngineLM` scores and generates with `laneformer.Engine`. Requests are sorted by their ids, so that those with a common
prefix (the choices of one question, the shots of one task) follow each other and its KV cache is reused. Nothing is
truncated silently: a prompt longer than the context is truncated from the left, as in lm-eval's own models, but is
counted in `cut_prompts` and reported.

Importing this file registers `laneformer`: `lm_eval.simple_evaluate(model="laneformer", model_args="pretrained=DIR")`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from evals.scorer import open_engine
from laneformer.engine.text import StopStrings, TextStream, text_of

MAX_GEN_TOKS = 256  # lm-eval's default where a task names no limit
log = logging.getLogger(__name__)


@register_model("laneformer")
class EngineLM(TemplateLM):
    """A Laneformer folder as an lm-eval model.

    add_bos: prepend BOS to every prompt, as in training. max_length: context in tokens, default config.json's; a longer
    one extrapolates beyond the trained positions. ValueError for a folder without a tokenizer.
    """

    def __init__(
        self, pretrained: str | Path, device: str = "auto", add_bos: bool = True, max_length: int | None = None
    ):
        super().__init__()
        self.folder = Path(pretrained)
        self.engine = open_engine(self.folder, device, context_tokens=max_length)
        if self.engine.tokenizer is None:
            raise ValueError(f"{self.folder} holds no tokenizer.json, which lm-eval needs; export the model again")
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(self.folder)
        self.add_bos = add_bos
        self.max_length = self.engine.config.max_position_embeddings
        self.cut_prompts = 0

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without context: BOS, or EOS if there is none."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def scoring_room(self) -> int:
        """Maximum length of a prompt with its continuation: the last id is only predicted."""
        return self.max_length + 1

    @property
    def tokenizer_name(self) -> str:
        return str(self.folder).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text; None: add BOS if the model was opened with add_bos and the text does not begin with it."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = self.add_bos and not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(sum of log p of the continuation in nats, whether greedy decoding would have written it) of each request."""
        answers = [(0.0, False)] * len(requests)
        for i in in_prefix_order([c + n for _, c, n in requests], "scoring", disable_tqdm):
            key, context, continuation = requests[i]
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens does not fit the context of {self.max_length}"
                )
            ids = self._fitting(context + continuation, self.scoring_room)
            scores = self.engine.logprobs(ids, start=len(ids) - len(continuation), top=1)
            answers[i] = math.fsum(scores.logprobs.tolist()), bool(scores.is_greedy.all())
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answers[i])
        self._report_cuts()
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts in nats: every token once, after BOS, in windows of the context's length."""
        sums = []
        for request in tqdm(requests, desc="rolling", disable=disable_tqdm):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            sums.append(math.fsum(score for score, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), sums[-1])
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text after each prompt, up to EOS, the task's first stop string (not included) or its token limit."""
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        answers = [""] * len(requests)
        for i in in_prefix_order(prompts, "generating", disable_tqdm):
            answers[i] = self._generate(prompts[i], requests[i].args[1])
            self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
        self._report_cuts()
        return answers

    def _generate(self, prompt: list[int], task_options: dict[str, Any]) -> str:
        options: dict[str, Any] = dict(normalize_gen_kwargs(task_options, MAX_GEN_TOKS))
        stops, limit = options.pop("until"), options.pop("max_gen_toks")
        if not options.pop("do_sample"):
            options["temperature"] = 0.0
        if limit >= self.max_length:
            raise ValueError(f"max_gen_toks = {limit} leaves no room for a prompt in {self.max_length} tokens")
        ids = self._fitting(prompt, self.max_length - limit)
        tokens = self.engine.stream(ids, max_new_tokens=limit, **options)
        assert self.engine.tokenizer is not None, "checked when it was opened"
        text = TextStream(self.engine.tokenizer, ids)
        return "".join(text_of(tokens, text, StopStrings(stop for stop in stops if stop)))

    def _fitting(self, ids: list[int], room: int) -> list[int]:
        """The last `room` ids; a cut is counted."""
        self.cut_prompts += len(ids) > room
        return ids[-room:]

    def _report_cuts(self) -> None:
        if self.cut_prompts:
            log.warning("%d prompts so far lost their head: the context is %d", self.cut_prompts, self.max_length)


class CheckedCompletions(LocalCompletionsAPI):
    """lm-eval's `local-completions`, which believes any answer: a server without prompt scores would give chance."""

    @property
    def scoring_room(self) -> int:
        """Ids of the longest prompt with its continuation; the server adds one, and lm-eval keeps its place free."""
        return self.max_length

    def tok_encode(self, string: str | list[str], *args: Any, **kwargs: Any) -> Any:
        """As lm-eval's, but a text that begins with BOS, as chat templates write it, gets no second one."""
        if isinstance(string, list):
            return [self.tok_encode(one, *args, **kwargs) for one in string]
        ids = super().tok_encode(string, *args, **kwargs)
        bos = self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    @staticmethod
    def parse_logprobs(
        outputs: dict | list[dict],
        tokens: list[list[int]] | None = None,
        ctxlens: list[int] | None = None,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """As lm-eval's; ValueError unless every id of the prompt, and one new one, has its score."""
        answers = [outputs] if isinstance(outputs, dict) else outputs
        choices = [c for answer in answers for c in sorted(answer["choices"], key=lambda choice: choice["index"])]
        for choice, ids in zip(choices, tokens or [], strict=True):
            given = choice.get("logprobs") or {}
            scores, top = (given.get(name) or [] for name in ("token_logprobs", "top_logprobs"))
            if not len(scores) == len(top) == len(ids) + 1 or any(score is None for score in scores[1:]):
                raise ValueError(
                    f"the server gave {len(scores)} log-probabilities for a prompt of {len(ids)} ids; lm-eval needs "
                    "one for each of them and exactly one new token (echo=true, logprobs=1, max_tokens=1)"
                )
        return LocalCompletionsAPI.parse_logprobs(outputs, tokens=tokens, ctxlens=ctxlens, **kwargs)


def in_prefix_order(prompts: Sequence[list[int]], doing: str, quiet: bool) -> Iterator[int]:
    """The indices of the prompts in the order of their ids, under a progress bar."""
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    yield from tqdm(order, desc=doing, disable=quiet)
