"""Decode speed from bandwidth, link latency, bytes a token and the time that a layer costs beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli

from laneformer import LaneformerConfig

from .timeline import laneformer_joins, token_s

INPUTS = Path(__file__).parent / "inputs.toml"
GPUS = ("h200", "mi300x")
NODE_GPUS = 8


@dataclass
class Inputs:
    """Values of inputs.toml by dotted name, some replaced."""

    tables: dict[str, Any]

    @classmethod
    def read(cls, replaced: Mapping[str, float] | None = None) -> Inputs:
        """ValueError for a name that the file has not."""
        inputs = cls(tomli.loads(INPUTS.read_text(encoding="utf-8")))
        for name, value in (replaced or {}).items():
            if name not in inputs.rows():
                raise ValueError(f"no input {name!r}; choose from {', '.join(inputs.rows())}")
            inputs.rows()[name] |= {"value": value, "kind": "given", "source": "the command line"}
        return inputs

    def rows(self) -> dict[str, dict[str, Any]]:
        """Every input with its kind and source."""
        return {
            f"{group}.{name}": row
            for group, rows in self.tables.items()
            if group != "large"
            for name, row in rows.items()
        }

    def __getitem__(self, name: str) -> float:
        return self.rows()[name]["value"]

    @cached_property
    def config(self) -> LaneformerConfig:
        return LaneformerConfig.from_flavor("2b")

    @property
    def bytes_per_token(self) -> float:
        """Of the 2B in 16 bits, at the first position: all weights but the embedding table."""
        count = self.config.parameter_count()
        return 2 * (count["total"] - count["embedding"])

    def usable(self, gpu: str, gpus: int = NODE_GPUS) -> float:
        """Bytes a second that `gpus` of a kind read together."""
        return gpus * self[f"{gpu}.bandwidth_bytes_per_s"] * self[f"{gpu}.usable_bandwidth"]


def ceilings(inputs: Inputs) -> list[dict[str, Any]]:
    """Tokens/s if nothing but reading weights took time: by the published 4 GB, and by the config's bytes."""
    return [
        {
            "gpus": f"{NODE_GPUS} x {gpu}",
            "published_bytes": inputs.usable(gpu) / inputs["published.bytes_per_token"],
            "config_bytes": inputs.usable(gpu) / inputs.bytes_per_token,
            "published_speed": inputs[f"{gpu}.published_tokens_per_s"],
            "published_share": inputs[f"{gpu}.published_tokens_per_s"]
            / inputs.usable(gpu)
            * inputs.bytes_per_token,
        }
        for gpu in GPUS
    ]


def launch_limit(inputs: Inputs) -> float:
    """Tokens/s of a model that launches a kernel for every operation, if nothing else took time."""
    return 1 / (inputs["launch.kernel_s"] * inputs["launch.kernels_per_layer"] * inputs["launch.layers"])


def large_models(inputs: Inputs) -> list[dict[str, Any]]:
    """The published table, its rule with nominal bits, and the bits a weight that its figures imply."""
    share = (
        inputs["mi300x.published_tokens_per_s"]
        * inputs["published.bytes_per_token"]
        / inputs.usable("mi300x")
    )
    rows = []
    for name, model in inputs.tables["large"].items():
        nominal = model["active_parameters"] * model["bits"] / 8
        row: dict[str, Any] = {"model": name, "bits": model["bits"]}
        for gpu in GPUS:
            row[gpu] = share * inputs.usable(gpu) / nominal
            row[f"{gpu}_published"] = model["published"][gpu]
        implied = share * inputs.usable("h200") / model["published"]["h200"] * 8 / model["active_parameters"]
        rows.append({**row, "implied_bits": implied})
    return rows


def layer_cost_s(inputs: Inputs, gpu: str) -> float:
    """What a layer costs beside reading its weights, so that the published speed comes out (fitted)."""
    wanted = 1 / inputs[f"{gpu}.published_tokens_per_s"]
    low, high = 0.0, wanted / inputs.config.num_hidden_layers
    for _ in range(60):  # the time grows with the cost
        middle = (low + high) / 2
        spent = decode_s(inputs, gpu, NODE_GPUS, inputs["link.custom_s"], inputs.config, middle)
        low, high = (middle, high) if spent < wanted else (low, middle)
    return low


def decode_s(
    inputs: Inputs,
    gpu: str,
    gpus: int,
    link_s: float,
    config: LaneformerConfig,
    layer_cost: float,
    ladder: bool = False,
) -> float:
    """Seconds of a token on `gpus`; the weights of a layer split as attention and MLP have them."""
    n, count = config.num_hidden_layers, config.parameter_count()
    per_s = inputs.usable(gpu, gpus)
    attention = (config.query_size + config.head_dim * config.num_key_value_heads) * 2 * config.hidden_size
    shares = attention / count["layer"], 1 - attention / count["layer"]
    layer_s = 2 * count["layer"] / per_s + layer_cost
    link_s = link_s if gpus > 1 else 0.0
    attention_s, mlp_s = (layer_s * share for share in shares)
    through = token_s(n, (attention_s, mlp_s), link_s, laneformer_joins(config), modules_late=int(ladder))
    return through + 2 * count["lm_head"] / per_s


def scaling(inputs: Inputs, gpu: str) -> list[dict[str, Any]]:
    """The 2B on 1 to 16 GPUs: tokens/s of tensor parallelism, Ladder and delays, for each link.

    More GPUs than one node's are two nodes, whose link is the slower one; they would need a
    model of 16 lanes.
    """
    cost = layer_cost_s(inputs, gpu)
    rows = []
    for gpus in (1, 2, 4, 8, 16):
        links = ("between_nodes",) if gpus > NODE_GPUS else ("nccl", "custom", "one_shot")
        for link in links:
            row: dict[str, Any] = {"gpus": gpus, "nodes": -(-gpus // NODE_GPUS), "link": link}
            for name, (values, ladder) in VARIANTS.items():
                config = LaneformerConfig.from_flavor("2b", **values)
                row[name] = 1 / decode_s(inputs, gpu, gpus, inputs[f"link.{link}_s"], config, cost, ladder)
            rows.append(row)
    return rows


def by_link(inputs: Inputs, gpu: str) -> list[dict[str, float]]:
    """Tokens/s of every variant on one node whose link takes 0.5 to 200 us, twenty steps a decade."""
    cost, rows = layer_cost_s(inputs, gpu), []
    for step in range(53):
        row = {"link_s": 0.5e-6 * 10 ** (step / 20)}
        for name, (values, ladder) in VARIANTS.items():
            config = LaneformerConfig.from_flavor("2b", **values)
            row[name] = 1 / decode_s(inputs, gpu, NODE_GPUS, row["link_s"], config, cost, ladder)
        rows.append(row)
    return rows


VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "tensor_parallel": ({"broadcast_delay": 0}, False),
    "ladder": ({"broadcast_delay": 0}, True),
    "delay_1": ({"broadcast_delay": 1}, False),
    "delay_2": ({"broadcast_delay": 2}, False),
    "delay_2_no_early": ({"broadcast_delay": 2, "use_early_comm": False}, False),
}


def agent_loop(inputs: Inputs, speeds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Seconds of an agent's task at each speed: decoding, and the tools beside it."""
    tools_s = inputs["agent.tool_calls"] * inputs["agent.tool_call_s"]
    return [
        {
            "speed": name, "tokens_per_s": speed, "decode_s": inputs["agent.tokens"] / speed, "tools_s": tools_s,
            "decode_share": inputs["agent.tokens"] / speed / (inputs["agent.tokens"] / speed + tools_s),
        }
        for name, speed in speeds.items()
    ]  # fmt: skip
