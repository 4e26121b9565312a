"""Write a folder as Laneformer's first modeling code did: its spellings, names and code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from laneformer import LaneformerConfig
from laneformer.config import hf_name
from tools.check.reference import random_weights

# keys as the first release spelled them
OLDER = {
    "model_type": "laneformer_tp",
    "architectures": ["LaneformerTPForCausalLM"],
    "dtype": "float32",
    "auto_map": {
        "AutoConfig": "configuration_laneformer.LaneformerTPConfig",
        "AutoModelForCausalLM": "modeling_laneformer.LaneformerTPForCausalLM",
    },
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_lanes": 4,
    "broadcast_delay": 2,
    "max_position_embeddings": 96,
    "vocab_size": 120,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "multiple_of": 32,
    "depth_init": True,
    "use_flex_attn": False,
    "attn_mask_type": "causal",
    "use_cache": True,
    "use_comm": True,
    "use_early_comm": True,
    "lm_head_type": "vocab_parallel",
    "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True,
    "tie_word_embeddings": False,
    "sliding_window": 7,
    "sliding_window_n_layers": 3,
    "eos_token_id": 2,
}
CONFIGURATION = """
from transformers import PretrainedConfig

class LaneformerTPConfig(PretrainedConfig):
    model_type = "laneformer_tp"
"""
# plain code that shares nothing with ours: a second opinion on what the spellings mean
MODELING = """
import math, torch
from torch import nn
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from .configuration_laneformer import LaneformerTPConfig

class Weight(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x):
        return torch.einsum("bsli,loi->bslo", x, self.weight)

class Scale(nn.Module):
    def __init__(self, lanes, size):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(lanes, size))

def norm(x, module, eps):
    weight = module.scale if hasattr(module, "scale") else module.weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

class Layer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.c, self.index = c, index
        L, D, F, d = c.num_lanes, c.hidden_size, c.intermediate_size, c.hidden_size // c.num_attention_heads
        kv = d * c.num_key_value_heads
        self.attention, self.feed_forward = nn.Module(), nn.Module()
        for name, out in (("wq", D), ("wk", kv), ("wv", kv)):
            setattr(self.attention, name, Weight(L, out // L, D))
        self.attention.wo, self.feed_forward.w2 = Weight(L, D, D // L), Weight(L, D, F // L)
        self.feed_forward.w1, self.feed_forward.w3 = Weight(L, F // L, D), Weight(L, F // L, D)
        for name in ("attention_norm", "ffn_norm"):
            setattr(self, name, Weight(D) if c.replicated_rmsn_scale else Scale(L, D))
        early = index < c.broadcast_delay
        self.mode = "present" if early and c.use_early_comm else "past" if c.use_comm and not early else "alone"

    def join(self, x, past):
        if self.mode == "present":
            return x.sum(-2, keepdim=True)
        return x * math.sqrt(self.c.num_lanes) if self.mode == "alone" else x + past.sum(-2, keepdim=True) - past

    def attend(self, x, mask):
        c, (B, S) = self.c, x.shape[:2]
        d = c.hidden_size // c.num_attention_heads
        heads = lambda y: y.reshape(B, S, -1, d)
        turn = torch.outer(torch.arange(S), c.rope_theta ** (-torch.arange(0, d, 2).float() / d))
        spin = lambda y: torch.view_as_real(torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2).contiguous())
                                            * torch.polar(torch.ones_like(turn), turn)[:, None]).flatten(3)
        q, k, v = (heads(w(x)) for w in (self.attention.wq, self.attention.wk, self.attention.wv))
        q, k = spin(q), spin(k)
        k, v = (y.repeat_interleave(c.num_attention_heads // c.num_key_value_heads, 2) for y in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(d)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
        return self.attention.wo(mixed.reshape(B, S, c.num_lanes, -1))

    def forward(self, h, past, mask):
        attention = self.attend(norm(h, self.attention_norm, self.c.norm_eps), mask)
        h = h + self.join(attention, past[0])
        x, f = norm(h, self.ffn_norm, self.c.norm_eps), self.feed_forward
        mlp = f.w2(silu(f.w1(x)) * f.w3(x))
        return h + self.join(mlp, past[1]), attention, mlp

class LaneformerTPForCausalLM(PreTrainedModel):
    config_class = LaneformerTPConfig

    def __init__(self, c):
        super().__init__(c)
        self.model = nn.Module()
        self.model.tok_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.model.norm = Weight(c.hidden_size) if c.replicated_rmsn_scale else Scale(c.num_lanes, c.hidden_size)
        self.lm_head = Weight(c.num_lanes, c.vocab_size // c.num_lanes, c.hidden_size)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, past_key_values=None, use_cache=None, logits_to_keep=0, **other):
        c = self.config
        ids = input_ids if past_key_values is None else torch.cat([past_key_values, input_ids], 1)
        h = self.model.tok_embeddings(ids)[:, :, None].expand(-1, -1, c.num_lanes, -1)
        apart = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
        partials, n = [], c.sliding_window_n_layers
        for i, layer in enumerate(self.model.layers):
            windowed = i < n or i >= c.num_hidden_layers + n
            mask = (apart >= 0) & (apart < c.sliding_window) if windowed else apart >= 0
            past = partials[i - c.broadcast_delay] if i >= c.broadcast_delay else (None, None)
            h, *parts = layer(h, past, mask)
            partials.append(parts)
        logits = self.lm_head(norm(h, self.model.norm, c.norm_eps)).flatten(2)
        return CausalLMOutputWithPast(logits=logits[:, -logits_to_keep:], past_key_values=ids)
"""


def write_published(folder: Path, config: LaneformerConfig, **values: Any) -> Path:
    """Write random float32 weights of `config`, which `values` over OLDER must come to mean."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**OLDER, **values}))
    (folder / "configuration_laneformer.py").write_text(CONFIGURATION)
    (folder / "modeling_laneformer.py").write_text(MODELING)
    weights = {hf_name(name): weight.float() for name, weight in random_weights(config).items()}
    if not config.replicated_rmsn_scale:
        weights = {
            name.replace("norm.weight", "norm.scale"): weight for name, weight in weights.items()
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
