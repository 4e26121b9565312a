"""Any scorer as a model of lm-eval; importing this file registers `laneformer`:
`lm_eval.simple_evaluate(model="laneformer", model_args="pretrained=DIR")`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from evals.items import WINDOW, Partial
from evals.scorer import LOCAL, Answerer, Prompt, load_tokenizer, open_scorer
from records.files import JsonObject

MAX_GEN_TOKS = 256  # lm-eval's default where a task names no limit


@register_model("laneformer")
class ScorerLM(TemplateLM):
    """A model folder as an lm-eval model, answered by `answerer`.

    Args:
        add_bos: prepend BOS to every prompt, as in training.
    """

    def __init__(self, pretrained: str | Path, answerer: Answerer = LOCAL, add_bos: bool = True):
        super().__init__()
        self.folder = Path(pretrained)
        self.scorer = open_scorer(self.folder, answerer)
        self.tokenizer = load_tokenizer(self.folder)
        # whether the tokenizer does so by itself or not
        self.add_bos = add_bos and self.tokenizer.bos_token_id is not None
        self.max_length = self.scorer.max_length
        self.max_scored_ids = self.scorer.max_scored_ids
        self.prompt_tokens = 0
        # holds the answers of an evaluation that was interrupted; `main` sets it
        self.partial = Partial()

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """BOS, or EOS if there is none: the context of a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.folder).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text; False: without BOS, though the model was opened with add_bos."""
        ids = self.tokenizer.encode(string, add_special_tokens=False)
        bos = self.tokenizer.bos_token_id
        begins = add_special_tokens is False or not self.add_bos or ids[:1] == [bos]
        return ids if begins else [bos, *ids]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        # as in training, BOS only where the template writes it
        self.add_bos = False
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Return (log p of the continuation in nats, whether it is the greedy one) of each request."""
        order = sort_by_prefix([context + continuation for _, context, continuation in requests])
        # requests of one context, the choices of a question, are one item
        items = [list(group) for _, group in itertools.groupby(order, lambda i: requests[i][1])]
        prompts = [[self._prompt(*requests[i][1:]) for i in item] for item in items]

        def answer(remaining: Iterator[list[Prompt]]) -> Iterator[list[tuple[float, bool]]]:
            for scores in self.scorer.score(remaining):
                yield [(math.fsum(s.logprobs.tolist()), bool(s.greedy.all())) for s in scores]

        scored = self._complete("scoring", prompts, answer, disable_tqdm, WINDOW)
        answers = [(0.0, False)] * len(requests)
        for item, of_item in zip(items, scored, strict=True):
            for i, (nats, greedy) in zip(item, of_item, strict=True):
                answers[i] = nats, greedy
        return answers

    def _prompt(self, context: list[int], continuation: list[int]) -> Prompt:
        if len(continuation) >= self.max_scored_ids:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens does not fit the context of {self.max_length}"
            )
        ids = self._fitting(context + continuation, self.max_scored_ids)
        return Prompt(ids, len(ids) - len(continuation))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log p of whole texts in nats."""
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        return self._complete(
            "rolling", texts, functools.partial(map, self.scorer.rolling), disable_tqdm
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate up to EOS, the task's first stop string or its token limit."""
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        # neighbours share a prefix, whose keys and values the engine keeps
        order = sort_by_prefix(prompts)
        requests_in_order = [(prompts[i], requests[i].args[1]) for i in order]
        generate = functools.partial(itertools.starmap, self._generate)
        texts = self._complete("generating", requests_in_order, generate, disable_tqdm)
        answers = [""] * len(requests)
        for i, text in zip(order, texts, strict=True):
            answers[i] = text
        return answers

    def _complete(
        self,
        kind: str,
        items: list[Any],
        answer: Callable[[Iterator[Any]], Iterator[Any]],
        quiet: bool,
        together: int = 1,
    ) -> list[Any]:
        """Answer all items but those that an interrupted evaluation has answered."""
        name = f"{kind}-{hashlib.sha256(repr(items).encode()).hexdigest()[:16]}"
        return self.partial.complete(name, tqdm(items, kind, disable=quiet), answer, together)

    def _generate(self, prompt: list[int], task_options: JsonObject) -> str:
        options: JsonObject = dict(normalize_gen_kwargs(task_options, MAX_GEN_TOKS))
        stops = options.pop("until")
        limit = options.pop("max_gen_toks")
        if not options.pop("do_sample"):
            options["temperature"] = 0.0
        if limit >= self.max_length:
            raise ValueError(
                f"max_gen_toks = {limit} leaves no room for a prompt in {self.max_length} tokens"
            )
        ids = self._fitting(prompt, self.max_length - limit)
        self.prompt_tokens += len(ids)
        return self.scorer.generate(ids, limit, [stop for stop in stops if stop], **options).text

    def _fitting(self, ids: list[int], room: int) -> list[int]:
        """Keep the last `room` ids; warn of a prompt that loses its head."""
        if len(ids) > room:
            warnings.warn(
                f"prompts lose their head: the context is {self.max_length} tokens", stacklevel=1
            )
        return ids[-room:]


def sort_by_prefix(prompts: Sequence[list[int]]) -> list[int]:
    # those with a common prefix, such as the shots of a task, follow each other
    return sorted(range(len(prompts)), key=prompts.__getitem__)
