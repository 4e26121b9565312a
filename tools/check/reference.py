"""What an engine is checked against: random weights, PyTorch and Transformers models, distances, a planted fault.

Needs torch and Transformers alone, so that it also runs where the CPU engine is not built.

    S positions   V vocabulary
"""

from __future__ import annotations

import numpy as np
import torch

from laneformer import Laneformer, LaneformerConfig
from laneformer.config import hf_name
from laneformer.engine.folder import Tensor
from laneformer.hf.configuration_laneformer import LaneformerHFConfig
from laneformer.hf.modeling_laneformer import LaneformerForCausalLM

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
Weights = dict[str, torch.Tensor]


def random_weights(
    config: LaneformerConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> Weights:
    """Matrices that keep the size of what goes through them, norm scales around one; each device draws its own."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Laneformer(config).state_dict().items()}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, device=device)
        gain = 1.0 if name.startswith("tok_embeddings") else shape[-1] ** -0.5
        weights[name] = (1 + 0.2 * noise if name.endswith("norm.weight") else gain * noise).to(dtype)
    return weights


def tensors_of(weights: Weights) -> dict[str, Tensor]:
    return {
        name: Tensor(DTYPE_NAMES[w.dtype], (w if w.dtype == torch.float32 else w.view(torch.uint16)).cpu().numpy())
        for name, w in weights.items()
    }


def plain_model(config: LaneformerConfig, weights: Weights) -> Laneformer:
    """model.py in float64."""
    with torch.device("meta"):
        model = Laneformer(config).eval()
    model.load_state_dict({name: w.double() for name, w in weights.items()}, assign=True)
    return model


def hf_model(config: LaneformerConfig, weights: Weights, dtype: torch.dtype) -> LaneformerForCausalLM:
    with torch.device("meta"):
        model = LaneformerForCausalLM(LaneformerHFConfig(**config.to_dict())).eval()
    named = {hf_name(n): w.to(dtype) for n, w in weights.items()}
    model.load_state_dict(named, assign=True)
    return model


@torch.no_grad()
def hf_logits(model: LaneformerForCausalLM, ids: list[int]) -> np.ndarray:
    """(S, V) in the model's dtype, handed out as float32."""
    return model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0].float().cpu().numpy()


def relative_errors(logits: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """For each position the distance of two logit vectors over the spread of the reference's, (S,)."""
    spread = reference - reference.mean(-1, keepdims=True)
    return np.linalg.norm(logits - reference, axis=-1) / np.linalg.norm(spread, axis=-1)


def mean_kl(logits: np.ndarray, others: np.ndarray) -> float:
    """KL(softmax(logits) || softmax(others)), mean over positions, in nats."""
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (logits, others))
    return float((p.exp() * (p - q)).sum(-1).mean())


@torch.no_grad()
def hf_greedy(model: LaneformerForCausalLM, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of Transformers with its cache, and how far each one's logit was ahead of the second."""
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


def without_message(config: LaneformerConfig, lost: tuple[int, str]) -> LaneformerConfig:
    """The config, but the other lanes never get what (layer, module) sends them."""

    def broadcasts(self: LaneformerConfig, layer: int, module: str) -> bool:
        return (layer, module) != lost and LaneformerConfig.broadcasts(self, layer, module)

    deaf: type[LaneformerConfig] = type("Deaf", (LaneformerConfig,), {"broadcasts": broadcasts})
    return deaf.from_dict(config.to_dict())
