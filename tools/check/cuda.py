"""Check the CUDA engine's logits, tokens and bits against Transformers on the same GPU.

    python -m tools.check cuda 300m

Transformers in float32 is the reference, in bf16 the yardstick.

    S positions   V vocabulary
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from laneformer import LaneformerConfig
from laneformer.engine.cuda.graph import RUNNERS
from laneformer.engine.cuda.passes import PassRunner
from laneformer.engine.cuda.structures import Column
from laneformer.engine.decoder import Sampling
from laneformer.engine.device import why_no_cuda
from tools.check.reference import (
    Weights,
    compare_greedy,
    hf_greedy,
    hf_logits,
    hf_model,
    length_beyond_windows,
    make_faults,
    mean_kl,
    random_ids,
    random_prompts,
    random_weights,
    relative_errors,
    tensors_of,
)

DEVICE = "cuda:0"
# greedy texts, and runs that must be equal bit for bit
PROMPTS, RUNS = 8, 20
# inside a kernel, where a wait takes microseconds
WAIT_S = 3.0
# positions of the scored text whose window excludes its start
BEYOND_WINDOW = 64
SHORT_LENGTH = 48
# PyTorch reads the last
PROMPT_LENGTHS = (1, 5, 11, 203)
NEW_TOKENS = 32
Report = dict[str, Any]
Figures = Iterator[tuple[str, Any]]
MakeDecoder = Callable[..., PassRunner]


@dataclasses.dataclass
class Reference:
    """Transformers on one text, and how far its own bf16 is from its float32."""

    ids: list[int]
    # (S, V), or of some positions
    logits: np.ndarray
    # of bf16: largest relative error of a position
    error: float
    kl: float
    # largest difference of a logit
    worst: float
    # of prompts: tokens and leads of float32
    continuations: dict[tuple[int, ...], tuple[list[int], list[float]]]


def reference(
    config: LaneformerConfig,
    weights: Weights,
    length: int,
    positions: Sequence[int] | slice = slice(None),
    prompts: Sequence[list[int]] = (),
) -> Reference:
    """Return both models' logits at `positions` of a random text; continue `prompts`."""
    # one model at a time, none on return: a 24 GB GPU has no room for one of `2b` beside the engine
    ids = random_ids(config, length)
    model = hf_model(config, weights, torch.float32)
    single = hf_logits(model, ids)[positions]
    continuations = {tuple(prompt): hf_greedy(model, prompt, NEW_TOKENS) for prompt in prompts}
    del model
    half = hf_logits(hf_model(config, weights, torch.bfloat16), ids)[positions]
    errors, worst = relative_errors(half, single), float(np.abs(half - single).max())
    return Reference(ids, single, float(errors.max()), mean_kl(single, half), worst, continuations)


def greedy_prompts(config: LaneformerConfig, count: int) -> list[list[int]]:
    return random_prompts(config, count, PROMPT_LENGTHS, NEW_TOKENS)


def read(
    decoder: PassRunner, ids: list[int], start: int, logits: torch.Tensor | None = None
) -> int:
    """Read ids[start:] in passes of as many columns as there are; return the next token."""
    columns = [Column(token, i, 0, sampling=Sampling(top_p=1.0)) for i, token in enumerate(ids)]
    for at in range(start, len(ids), decoder.columns):
        end = at + decoder.columns
        (picked,) = decoder.run(columns[at:end], 0, None if logits is None else logits[at:end])
    return picked[-1]


def greedy(
    decoder: PassRunner, prompt: list[int], new_tokens: int = NEW_TOKENS, max_passes: int = 16
) -> list[int]:
    """Return greedy tokens, with launches of up to `max_passes` passes."""
    start = 0
    if len(prompt) > decoder.unread:
        start = len(prompt) - 1
        list(decoder.read(prompt[:-1], 0, 0, start))
    tokens = [read(decoder, prompt, start)]
    while len(tokens) < new_tokens:
        last = Column(tokens[-1], len(prompt) + len(tokens) - 1, 0, sampling=Sampling(top_p=1.0))
        # several lengths of a launch; the first token came with the prompt's end
        more = min(len(tokens) % max_passes, decoder.extra_passes, new_tokens - len(tokens) - 1)
        tokens += [row[0] for row in decoder.run([last], more)]
    return tokens


def score(decoder: PassRunner, ids: list[int]) -> np.ndarray:
    """Return logits after every token, each read by the decode kernels, (S, V)."""
    logits = torch.full(
        (len(ids), decoder.config.vocab_size), float("nan"), device=decoder.devices[0]
    )
    read(decoder, ids, 0, logits)
    return logits.cpu().numpy()


def compare(logits: np.ndarray, truth: Reference) -> Report:
    """Return distances from float32, and whether they are within those of bf16; NaN never is."""
    # the kernels round weights, keys and values alone: closer than a model that rounds activations
    # too
    expected = truth.logits[: len(logits)]
    error, kl = float(relative_errors(logits, expected).max()), mean_kl(expected, logits)
    return {
        "relative_error": error,
        "kl": kl,
        "worst": float(np.abs(logits - expected).max()),
        "holds": bool(error <= truth.error and kl <= truth.kl),
    }


def check_greedy(decoder: PassRunner, truth: Reference, worst: float, count: int) -> Report:
    """Compare our tokens with float32's; a lead below both errors is a tie.

    worst: largest error of our logits.
    """

    def tie_of(prompt: list[int]) -> float:
        # at most bf16's own error, that of PyTorch in 16 bits, which reads the longer prompts
        return 2 * (min(worst, truth.worst) if len(prompt) <= decoder.unread else truth.worst)

    prompts = greedy_prompts(decoder.config, count)
    return compare_greedy(
        prompts,
        lambda prompt: greedy(decoder, prompt),
        lambda prompt, _: truth.continuations[tuple(prompt)],
        tie_of,
    )


def count_differing_runs(decoder: PassRunner, ids: list[int], runs: int) -> int:
    """Return how many of `runs` differ from the first in a bit of the logits."""
    first = score(decoder, ids).tobytes()
    return sum(score(decoder, ids).tobytes() != first for _ in range(runs - 1))


def check_faults(config: LaneformerConfig, weights: Weights, make: MakeDecoder) -> bool:
    """Return whether the gate passes the sound engine and refuses each planted fault."""
    truth = reference(config, weights, SHORT_LENGTH)

    def holds(config: LaneformerConfig, weights: Weights) -> bool:
        return compare(score(make(config, tensors_of(weights)), truth.ids), truth)["holds"]

    # a gate that passes everything would pass these as well
    passed = [holds(planted, values) for _, _, planted, values in make_faults(config, weights)]
    return holds(config, weights) and not any(passed)


def check(
    makers: Mapping[str, Callable[[], PassRunner]], truth: Reference, count: int, runs: int
) -> Figures:
    """Yield all figures of "passes" and "graph" but planted faults."""
    results: list[tuple[int, list[list[int]], np.ndarray]] = []
    # a failure of one does not stop the other
    for version, make in makers.items():
        try:
            decoder = make()
            logits = score(decoder, truth.ids)
            near = compare(logits, truth)
            yield f"relative error, {version}", near["relative_error"]
            yield f"{version}: closer to float32 than bf16 is", near["holds"]
            texts = check_greedy(decoder, truth, near["worst"], count)
            yield f"{version}: greedy tokens", texts["unexplained"] == 0
            yield (
                f"{version}: {runs} equal runs",
                count_differing_runs(decoder, truth.ids[:16], runs) == 0,
            )
            prompt = truth.ids[:4]
            yield (
                f"{version}: launch lengths",
                greedy(decoder, prompt) == greedy(decoder, prompt, max_passes=1),
            )
            results.append((decoder.geometry.warps, texts["ids"], logits))
        # a hang, a fault of the GPU, a version that cannot be made
        except (RuntimeError, ValueError) as error:
            yield f"{version}: runs", False
            yield f"{version} ended", str(error)
    # sums over a block depend on its warps
    if len({warps for warps, *_ in results}) == 1 < len(results):
        (_, tokens, logits), (_, other_tokens, other_logits) = results
        yield "both versions: the same tokens", tokens == other_tokens
        yield "both versions: the same bits", bool(np.array_equal(logits, other_logits))


def make_decoder(config: LaneformerConfig, tensors: Any, version: str = "passes") -> PassRunner:
    return RUNNERS[version](config, tensors, "bf16", (DEVICE,), WAIT_S, 0)


def check_flavor(flavor: str) -> Figures:
    """Yield names and values of all figures, False where a check fails.

    The planted faults come last, since they take longest.
    """
    config = LaneformerConfig.from_flavor(flavor)
    weights = random_weights(config, device=DEVICE)
    length = length_beyond_windows(config, BEYOND_WINDOW)
    truth = reference(config, weights, length, prompts=greedy_prompts(config, PROMPTS))
    yield "relative error, bf16 of Transformers", truth.error
    tensors = tensors_of(weights)
    makers = {
        version: functools.partial(make_decoder, config, tensors, version) for version in RUNNERS
    }
    yield from check(makers, truth, PROMPTS, RUNS)
    yield "planted faults are refused", check_faults(config, weights, make_decoder)


def main() -> None:
    # not tyro: a machine with a GPU may have torch and little else
    parser = argparse.ArgumentParser(
        "python -m tools.check cuda", description="Exit status 1 if a check fails."
    )
    parser.add_argument(
        "flavor", nargs="?", default="tiny", help="shape of the model; the default is tiny"
    )
    flavor = parser.parse_args().flavor
    if reason := why_no_cuda():
        print(
            f"cuda: {reason}. On a CPU, python -m tools.check engine checks the CPU engine",
            file=sys.stderr,
        )
        raise SystemExit(2)
    # printed as they come: a hang of the GPU shows how far the check was
    figures = {}
    for name, value in check_flavor(flavor):
        print(f"{name}: {value}", file=sys.stderr, flush=True)
        figures[name] = value
    print(json.dumps(figures))
    raise SystemExit(any(value is False for value in figures.values()))


if __name__ == "__main__":
    main()
