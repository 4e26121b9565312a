"""Make references for checks of an engine: random weights, PyTorch and Transformers models, faults.

S positions   P chosen positions   V vocabulary   N layers   L lanes   D hidden
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import kl_div

from laneformer import Laneformer, LaneformerConfig
from laneformer.config import hf_name
from laneformer.hf.configuration_laneformer import LaneformerHFConfig
from laneformer.hf.modeling_laneformer import LaneformerForCausalLM
from laneformer.joins import MODULES, Join
from laneformer.llama import layers as families
from laneformer.tensors import STORED_TYPES, Tensor, dtype_name

TORCH_DTYPES = {name: getattr(torch, stored.torch) for name, stored in STORED_TYPES.items()}
# unit roundoff: the largest relative error of one rounding to nearest
FP32, BF16 = 2.0**-24, 2.0**-9
# positions of a prompt that the engine reads at a time
BLOCK = 128
# of a module's matrices in a row: the normed stream, then the mixed values or the gated ones
ROUNDED_INPUTS = 2
# by a product of two inexact factors (gate and up, scores and values), in both modules of a layer
AMPLIFICATION = 4.0
Weights = dict[str, torch.Tensor]
# name; first module that is wrong, None: only the head
Fault = tuple[str, list[Any] | None, LaneformerConfig, Weights]


def random_weights(
    config: LaneformerConfig, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> Weights:
    """Return matrices that keep the size of their input, and norm scales around one."""
    # each device draws its own numbers
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in families.plain_model(config).state_dict().items()}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, device=device)
        # unit gain, so that every module matters: a fault in a weak one would drown in rounding
        gain = 1.0 if name.startswith("tok_embeddings") else shape[-1] ** -0.5
        weights[name] = (1 + 0.2 * noise if name.endswith("norm.weight") else gain * noise).to(
            dtype
        )
    return weights


def tensors_of(weights: Weights) -> dict[str, Tensor]:
    return {
        name: Tensor(
            dtype_name(w.dtype),
            (w if w.dtype == torch.float32 else w.view(torch.uint16)).cpu().numpy(),
        )
        for name, w in weights.items()
    }


def weights_of(tensors: Mapping[str, Tensor]) -> Weights:
    """Return the inverse of `tensors_of`, in its own memory."""
    return {
        name: torch.from_numpy(np.array(t.values)).view(TORCH_DTYPES[t.dtype])
        for name, t in tensors.items()
    }


def plain_model(
    config: LaneformerConfig,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.float64,
) -> Laneformer:
    """Return model.py's model; weights of this dtype are not copied."""
    with torch.device("meta"):
        model = families.plain_model(config).eval()
    model.load_state_dict({name: w.to(dtype) for name, w in weights.items()}, assign=True)
    return model


def hf_model(
    config: LaneformerConfig, weights: Weights, dtype: torch.dtype
) -> LaneformerForCausalLM:
    with torch.device("meta"):
        model = LaneformerForCausalLM(LaneformerHFConfig(**config.to_dict())).eval()
    model.load_state_dict({hf_name(name): w.to(dtype) for name, w in weights.items()}, assign=True)
    return model


@torch.no_grad()
def hf_logits(model: LaneformerForCausalLM, ids: list[int]) -> np.ndarray:
    """Return logits (S, V), computed in the model's dtype, as float32."""
    out = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    return out.logits[0].float().cpu().numpy()


def relative_errors(logits: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return each position's distance of two logit vectors over the reference's spread, (S,)."""
    spread = reference - reference.mean(-1, keepdims=True)
    return np.linalg.norm(logits - reference, axis=-1) / np.linalg.norm(spread, axis=-1)


def mean_kl(logits: np.ndarray, others: np.ndarray) -> float:
    """Return KL(softmax(logits) || softmax(others)), mean over positions, in nats."""
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (logits, others))
    return float(kl_div(q, p, reduction="batchmean", log_target=True))


@torch.no_grad()
def hf_greedy(
    model: LaneformerForCausalLM, prompt: list[int], new_tokens: int
) -> tuple[list[int], list[float]]:
    """Return greedy tokens of Transformers, and each one's logit lead over the second."""
    tokens: list[int] = []
    leads: list[float] = []
    ids, cache = torch.tensor([prompt], device=model.device), None
    for _ in range(new_tokens):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        best, cache = out.logits[0, -1].topk(2), out.past_key_values
        leads.append(float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        ids = best.indices[:1][None]
    return tokens, leads


def random_ids(config: LaneformerConfig, length: int) -> list[int]:
    return np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()


def random_prompts(
    config: LaneformerConfig, count: int, lengths: Sequence[int], new_tokens: int
) -> list[list[int]]:
    """Return prompts of the given lengths in turn, shorter where `new_tokens` would not fit."""
    rng, longest = np.random.default_rng(1), config.max_position_embeddings - new_tokens
    sizes = [max(1, min(longest, lengths[i % len(lengths)])) for i in range(count)]
    return [rng.integers(0, config.vocab_size, size).tolist() for size in sizes]


def compare_greedy(
    prompts: Sequence[list[int]],
    ours: Callable[[list[int]], list[int]],
    theirs: Callable[[list[int], int], tuple[list[int], list[float]]],
    tie_of: Callable[[list[int]], float],
) -> dict[str, Any]:
    """Compare continuations: how many are the same, and where and by what lead the others part.

    Args:
        theirs: returns so many new tokens and their leads (`hf_greedy`).
        tie_of: returns the lead below which a difference is explained.
    """
    diverged, tokens = [], []
    for index, prompt in enumerate(prompts):
        continuation = ours(prompt)
        expected, leads = theirs(prompt, len(continuation))
        tokens.append(continuation)
        if continuation != expected:
            first = int(np.argmax(np.not_equal(continuation, expected)))
            diverged.append(
                {"prompt": index, "token": first, "lead": leads[first], "tie": tie_of(prompt)}
            )
    return {
        "prompts": len(prompts),
        "same": len(prompts) - len(diverged),
        "diverged": diverged,
        "ids": tokens,
        "unexplained": sum(row["lead"] > row["tie"] for row in diverged),
    }


# --- every module's partial output, per layer, module and lane


@torch.no_grad()
def model_outputs(
    model: Laneformer, ids: Sequence[int], positions: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits (S, V) and partial outputs (P, N, 2, L, D), both in the model's dtype."""
    # in order of execution
    outputs: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, out: torch.Tensor) -> None:
        outputs.append(out[0, list(positions)])

    layers: Any = model.layers
    parts = [part for layer in layers for part in (layer.attention, layer.feed_forward)]
    hooks = [part.register_forward_hook(keep) for part in parts]
    logits = model(torch.tensor([list(ids)]))[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(outputs, 1).unflatten(1, (-1, len(MODULES))).numpy()


def windows(config: LaneformerConfig) -> set[int]:
    return set(filter(None, map(config.window, range(config.num_hidden_layers))))


def length_beyond_windows(config: LaneformerConfig, more: int) -> int:
    """Return the length of a text that ends `more` after the longest window, or at the limit."""
    return min(config.max_position_embeddings, max(windows(config), default=0) + more)


def choose_positions(config: LaneformerConfig, length: int) -> list[int]:
    """Return the first positions, those around each window's edge, a block after it, the last."""
    positions = {0, 1, 10, length - 1}
    # an off-by-one of a window shows at its edge alone
    for window in windows(config):
        positions |= {window + step for step in (-2, -1, 0, 16, BLOCK)}
    return sorted(p for p in positions if 0 <= p < length)


def output_errors(partials: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the distance of vectors (..., D) over the length of the reference's, (...)."""
    return np.linalg.norm(partials - reference, axis=-1) / np.linalg.norm(reference, axis=-1)


def limit_error(config: LaneformerConfig, depth: int, math: str) -> np.ndarray:
    """Bound the relative error that rounding explains at a position with `depth` before it, (N, 2)."""
    # the longest chain sums over D inputs of the norm and of the first matrix, then over head
    # dimensions and positions, or over a lane's intermediate size
    sums = (
        2 * config.hidden_size,
        config.head_dim,
        depth + 1,
        config.intermediate_size // config.num_lanes,
    )
    # K products in float32 err by about sqrt(K) roundings, as their signs are independent; inputs
    # rounded to bf16 err independently too, and do not grow with K. Weights are widened exactly
    one_module = FP32 * sum(np.sqrt(k) for k in sums) + (
        ROUNDED_INPUTS * BF16 if math == "bf16" else 0.0
    )
    # a stream is a sum of modules' outputs: the n-th module receives no more than n such errors
    count = np.arange(1, config.num_hidden_layers * len(MODULES) + 1)
    return (AMPLIFICATION * one_module * count).reshape(-1, len(MODULES))


def module_report(
    config: LaneformerConfig,
    partials: np.ndarray,
    reference: np.ndarray,
    positions: Sequence[int],
    math: str,
) -> dict[str, Any]:
    """Return errors by depth and module, worst over lanes, and the first module out of bounds."""
    # logits show that something is wrong, module outputs where: at the first one beyond rounding; (P, N, 2)
    errors = output_errors(partials, reference).max(-1)
    of_allowed = errors / np.array([limit_error(config, position, math) for position in positions])
    # NaN never is
    wrong = ~(of_allowed <= 1).all(0)
    by_depth = [
        {
            "depth": position + 1,
            "module": module,
            "relative_error": float(errors[p, :, m].max()),
            "layer": int(of_allowed[p, :, m].argmax()),
            "of_allowed": float(of_allowed[p, :, m].max()),
        }
        for p, position in enumerate(positions)
        for m, module in enumerate(MODULES)
    ]
    return {
        "by_depth": by_depth,
        "first_wrong": first_module(wrong),
        "of_allowed": float(of_allowed.max()),
    }


def first_module(wrong: np.ndarray) -> list[Any] | None:
    """Return [layer, module] of the first true entry of (N, 2) in order of execution."""
    if not wrong.any():
        return None
    layer, module = divmod(int(wrong.reshape(-1).argmax()), len(MODULES))
    return [layer, MODULES[module]]


def first_affected(config: LaneformerConfig, other: LaneformerConfig) -> list[Any] | None:
    """Return the first module whose join differs between two configs; None if only the head's."""

    def describe_join(config: LaneformerConfig, layer: int, module: str) -> tuple[Join, int | None]:
        join, source = config.join(layer, module), layer - config.broadcast_delay
        return join, source if join == Join.PAST and config.broadcasts(source, module) else None

    modules = [(layer, module) for layer in range(config.num_hidden_layers) for module in MODULES]
    changed = [
        describe_join(config, *module) != describe_join(other, *module) for module in modules
    ]
    return first_module(np.array([False, *changed[:-1]]).reshape(-1, len(MODULES)))


# --- planted faults


def make_faults(config: LaneformerConfig, weights: Weights) -> Iterator[Fault]:
    """Yield each fault that the architecture can have, as small as it can be."""
    # all faults concern lanes
    if config.num_lanes < 2:
        return
    layer = config.num_hidden_layers // 2
    name = f"layers.{layer}.feed_forward.w2.weight"
    swapped = weights[name].clone()
    swapped[[0, 1]] = weights[name][[1, 0]]
    yield "two lanes of one matrix swapped", [layer, "mlp"], config, {**weights, name: swapped}
    modules = [(i, m) for i in range(config.num_hidden_layers) for m in MODULES]
    muted = [without_message(config, module) for module in modules if config.broadcasts(*module)]
    if muted:
        # the last one that a module still reads, not the head alone
        wrong = next((c for c in reversed(muted) if first_affected(config, c)), muted[-1])
        yield "one module's remote partials dropped", first_affected(config, wrong), wrong, weights
    if any(config.join(*module) == Join.PAST for module in modules):
        later = dataclasses.replace(config, broadcast_delay=config.broadcast_delay + 1)
        yield "delay one more", first_affected(config, later), later, weights


def without_message(config: LaneformerConfig, muted: tuple[int, str]) -> LaneformerConfig:
    """Return the config with the message of (layer, module) to the other lanes removed."""

    def broadcasts(self: LaneformerConfig, layer: int, module: str) -> bool:
        return (layer, module) != muted and LaneformerConfig.broadcasts(self, layer, module)

    deaf: type[LaneformerConfig] = type("Deaf", (LaneformerConfig,), {"broadcasts": broadcasts})
    return deaf.from_dict(config.to_dict())
