"""Any causal language model of Transformers as a scorer: few passes, of many prompts each."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evals.items import WINDOW
from evals.scorer.base import (
    NOTHING,
    Answer,
    AnyPrompt,
    Prompt,
    Scorer,
    Scores,
    common_prefix,
    load_tokenizer,
    read_config,
)

# of a pass, padding included, unless one prompt alone has more
PASS_TOKENS = {"cuda": 8192, "cpu": 1024}
# tokens; reading fewer of them again costs less than one more pass
WORTH_A_PASS = {"cuda": 1536, "cpu": 512}


Place = tuple[int, int]  # (item, option)


def pack_prompts(
    items: Sequence[Sequence[Prompt]], device_type: str, keeps_prefix: bool
) -> Iterator[tuple[list[Place], int]]:
    """Plan the passes that score a window of items.

    Returns:
        Places of the prompts that are read together, and how many ids of a common prefix are read before.
    """
    loose: list[tuple[int, Place]] = []
    for i, item in enumerate(items):
        # prompts with nothing to score are in no pass
        options = [(i, k) for k, prompt in enumerate(item) if prompt.start < len(prompt.ids)]
        prompts = [item[k] for _, k in options]
        first = min((p.start - 1 for p in prompts), default=0)
        shared = min([first, *(common_prefix(prompts[0].ids, p.ids) for p in prompts)])
        # one pass for the prefix, one for all options: worth it from so many tokens not read again
        if keeps_prefix and shared * (len(options) - 1) >= WORTH_A_PASS[device_type]:
            yield options, shared
        else:
            loose += [(len(items[i][k].ids) - 1, (i, k)) for i, k in options]
    places: list[Place] = []
    # by length, so that a pass pads little
    for length, place in sorted(loose):
        if places and length * (len(places) + 1) > PASS_TOKENS[device_type]:
            yield places, 0
            places = []
        places.append(place)
    if places:
        yield places, 0


class TransformersScorer(Scorer):
    """A model folder in Transformers, on one device ("cpu", "cuda", "cuda:1") in its own data type."""

    backend, parallel = "transformers", 1
    reused_tokens: int

    def __init__(
        self, folder: Path, device: str = "cpu", max_length: int | None = None, dtype: Any = "auto"
    ):
        super().__init__(folder)
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        model_class: Any = AutoModelForCausalLM
        if read_config(folder).get("model_type") == "laneformer":
            # the installed class: the folder's code does not run
            from laneformer.hf.modeling_laneformer import LaneformerForCausalLM as model_class
        self._device = torch.device(device)
        model = model_class.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        self._model = model.to(self._device).eval()
        # where a text ends, and nothing else: penalties and beams of the folder would make greedy another thing
        self._model.generation_config = GenerationConfig(
            eos_token_id=model.generation_config.eos_token_id
        )
        self.device, self.dtype = device, str(self._model.dtype).removeprefix("torch.")
        config = self._model.config.get_text_config()
        self.max_length = int(
            max_length or getattr(config, "max_position_embeddings", None) or 1 << 30
        )
        self.max_scored_ids = self.max_length + 1
        self.reused_tokens = 0
        # ids that were read, and their keys and values
        self._last: tuple[list[int], Any] = ([], None)
        # a recurrent state cannot be copied for every option
        self._keeps_prefix = not getattr(self._model, "_is_stateful", False)
        takes = inspect.signature(self._model.forward).parameters
        self._few_logits = "logits_to_keep" in takes
        # past_key_values: its name before Transformers 5.24
        self._cache = "cache" if "cache" in takes else "past_key_values"
        with torch.inference_mode():
            if not self._logits([[self.eos_id or 0]], 1, None).isfinite().all():
                raise ValueError(
                    f"{folder} gives logits that are not finite: its weights are damaged, or overflow"
                )

    def score(self, items: Iterable[Sequence[Prompt]]) -> Iterator[list[Scores]]:
        remaining = iter(items)
        while window := [
            [self.check_prompt(Prompt(*p)) for p in item]
            for item in itertools.islice(remaining, WINDOW)
        ]:
            scores: list[list[Scores]] = [[NOTHING] * len(item) for item in window]
            for places, offset in pack_prompts(window, self._device.type, self._keeps_prefix):
                together = self._within_memory([window[i][k] for i, k in places], offset)
                for (i, k), prompt_scores in zip(places, together, strict=True):
                    scores[i][k] = prompt_scores
            yield from scores

    def _within_memory(self, prompts: Sequence[Prompt], offset: int) -> list[Scores]:
        """Score, in smaller passes if memory does not suffice."""
        import torch

        try:
            return self._score(prompts, offset)
        except torch.OutOfMemoryError:
            if len(prompts) == 1:
                raise
        # frees what the failed pass left; without a GPU it does nothing
        torch.cuda.empty_cache()
        half = len(prompts) // 2
        return self._within_memory(prompts[:half], offset) + self._within_memory(
            prompts[half:], offset
        )

    def _score(self, prompts: Sequence[Prompt], offset: int) -> list[Scores]:
        """Score prompts that share their first `offset` ids."""
        import torch

        cache = None
        # the last id is only predicted, never read
        rows = [p.ids[offset:-1] for p in prompts]
        width = max(map(len, rows))
        first = min(p.start for p in prompts) - 1 - offset
        # on the right, which no earlier position sees: neither a mask nor positions are needed
        padded = [row + [0] * (width - len(row)) for row in rows]
        with torch.inference_mode():
            if offset:
                from transformers import DynamicCache

                # without the config every layer keeps all positions, those with a sliding window too
                cache = DynamicCache()
                self._logits([prompts[0].ids[:offset]], 1, cache)
                cache.batch_repeat_interleave(len(rows))
            logits = self._logits(padded, width - first, cache)
            starts = [p.start - 1 - offset - first for p in prompts]
            option_logits = [logits[i, s : len(rows[i]) - first] for i, s in enumerate(starts)]
            targets = torch.tensor(
                [i for p in prompts for i in p.ids[p.start :]], device=self._device
            )
            scored_logits = torch.cat(option_logits).double()
            logprobs = scored_logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu().numpy()
            greedy = (scored_logits.argmax(-1) == targets).cpu().numpy()
        ends = np.cumsum([len(scores) for scores in option_logits])[:-1]
        return [
            Scores(*scores)
            for scores in zip(np.split(logprobs, ends), np.split(greedy, ends), strict=True)
        ]

    def _logits(self, rows: list[list[int]], count: int, cache: Any) -> Any:
        """Return logits (B, kept, V) of the last positions. cache: keys and values before it."""
        import torch

        options = {self._cache: cache, "use_cache": cache is not None}
        if self._few_logits:
            options["logits_to_keep"] = count
        output = self._model(input_ids=torch.tensor(rows, device=self._device), **options)
        return output.logits[:, -count:]

    def generate(
        self, prompt: AnyPrompt, max_new_tokens: int, stops: Sequence[str] = (), **sampling: Any
    ) -> Answer:
        import torch
        from transformers import set_seed

        ids = self.prompt_ids(prompt)
        if unknown := set(sampling) - {"temperature", "top_p", "top_k", "seed"}:
            raise ValueError(
                f"Transformers is asked for {sorted(unknown)}; known: temperature, top_p, top_k, seed"
            )
        set_seed(sampling.pop("seed", 0))
        draws = sampling.get("temperature", 0.0) > 0
        options: dict[str, Any] = {"do_sample": draws, "pad_token_id": self.eos_id}
        if draws:
            # from the whole distribution, as the engine: its defaults are no top-k and no top-p
            options |= {"top_k": 0, "top_p": 1.0, **sampling}
        if stops:
            options |= {"stop_strings": list(stops), "tokenizer": load_tokenizer(self.folder)}
        prompt_ids = torch.tensor([ids], device=self._device)
        room = self.room(ids, max_new_tokens)
        with torch.inference_mode():
            options |= self._prefix_of(ids)
            out = self._model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                max_new_tokens=room,
                **options,
            )
            self._last = out[0].tolist(), options.get(self._cache)
        new = out[0, len(ids) :].tolist()
        full_text = self.text_after(ids, new)
        text = cut_at_stop(full_text, stops)
        eos = self._model.generation_config.eos_token_id
        ended = len(text) < len(full_text) or new[-1] in (eos if isinstance(eos, list) else [eos])
        return Answer(text, "stop" if ended else "length")

    def _prefix_of(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return the option of `generate` with the keys and values shared with the last prompt."""
        if not self._keeps_prefix:
            return {}
        from transformers import DynamicCache

        # a pass that fails leaves neither
        (before, cache), self._last = self._last, ([], None)
        # the last id is read again, for its logits
        shared = min(common_prefix(before, ids), len(ids) - 1)
        if not shared or cache is None:
            return {self._cache: DynamicCache()}
        if (beyond := cache.get_seq_length() - shared) > 0:
            cache.crop(-beyond)
        self.reused_tokens += cache.get_seq_length()
        return {self._cache: cache}

    def close(self) -> None:
        del self._model, self._last


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    places = [text.find(stop) for stop in stops]
    return text[: min((place for place in places if place >= 0), default=len(text))]
