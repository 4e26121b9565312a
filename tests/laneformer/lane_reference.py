"""A literal NumPy version of LANEFORMER.md's update table in float64: one token, lane and head at a time."""

from __future__ import annotations

import math

import numpy as np

from laneformer import LaneformerConfig

Weights = dict[str, np.ndarray]


# This version is slow and shares no code with model.py, so that their agreement says something.
# `plant` introduces one known error, to show that a comparison would detect it.
def rms_norm(x: np.ndarray, scale: np.ndarray, lane: int, eps: float) -> np.ndarray:
    # one scale for all lanes, or one for each
    own_scale = scale if scale.ndim == 1 else scale[lane]
    return x / np.sqrt((x * x).mean() + eps) * own_scale


def rotate(x: np.ndarray, position: int, rope: tuple[list[float], float] | None) -> np.ndarray:
    """Rotate one head's vector as d/2 complex numbers; `rope` is (radians per position, scale)."""
    if rope is None:
        return x
    turned = np.empty(len(x))
    for j, frequency in enumerate(rope[0]):
        z = complex(x[2 * j], x[2 * j + 1]) * np.exp(1j * position * frequency) * rope[1]
        turned[2 * j], turned[2 * j + 1] = z.real, z.imag
    return turned


def layer_rope(c: LaneformerConfig, layer: int) -> tuple[list[float], float] | None:
    """Return a layer's radians per position and its scale, or None for a layer without RoPE.

    YaRN follows its paper (arXiv 2309.00071, sections 3.2 to 3.4).
    """
    windowed = layer in c.swa_layers
    if layer in c.nope_layers:
        return None
    theta = c.window_rope_theta if windowed and c.window_rope_theta else c.rope_theta
    plain = [theta ** (-2 * j / c.head_dim) for j in range(c.head_dim // 2)]
    s = c.rope_scaling
    if s is None or (windowed and s.get("layers") == "full"):
        return plain, 1.0
    borders = []  # the pairs that turn 32 times and once in the length that was trained
    for turns, rounds in ((s.get("beta_fast", 32), math.floor), (s.get("beta_slow", 1), math.ceil)):
        wavelengths = s["original_max_position_embeddings"] / (2 * math.pi * turns)
        borders.append(rounds(c.head_dim / 2 * math.log(wavelengths) / math.log(theta)))
    low, high = max(borders[0], 0), min(borders[1], c.head_dim - 1)
    high += 0.001 * (low == high)
    shares = [1 - min(max((j - low) / (high - low), 0), 1) for j in range(len(plain))]
    mixed = [f * k + f / s["factor"] * (1 - k) for f, k in zip(plain, shares, strict=True)]
    return mixed, s.get("attention_factor", 0.1 * math.log(s["factor"]) + 1)


def attend(query: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
    scores = np.array([query @ key for key in keys]) / np.sqrt(len(query))
    # a softmax; subtracting the maximum avoids overflow
    weights = np.exp(scores - scores.max())
    return sum(w * v for w, v in zip(weights / weights.sum(), values, strict=True))


def lane_attention(
    c: LaneformerConfig, w: Weights, layer: int, lane: int, x: list[np.ndarray], window: int | None
) -> list[np.ndarray]:
    """Return one lane's partial output for every token; x is the lane's normed stream, one row per token."""
    wq, wk, wv, wo = (
        w[f"layers.{layer}.attention.{name}.weight"][lane] for name in ("wq", "wk", "wv", "wo")
    )
    d, heads, kv_heads = (
        c.head_dim,
        c.num_attention_heads // c.num_lanes,
        c.num_key_value_heads // c.num_lanes,
    )
    head_rows = [slice(h * d, (h + 1) * d) for h in range(heads)]  # the rows of one head
    rope = layer_rope(c, layer)
    keys = [
        [rotate((wk @ row)[head_rows[k]], t, rope) for t, row in enumerate(x)]
        for k in range(kv_heads)
    ]
    values = [[(wv @ row)[head_rows[k]] for row in x] for k in range(kv_heads)]
    partial = []
    for t, row in enumerate(x):
        first = 0 if window is None else max(0, t - window + 1)
        head_outputs = []
        for h in range(heads):
            # grouped-query attention: consecutive heads share a KV head
            kv = h // (heads // kv_heads)
            query = rotate((wq @ row)[head_rows[h]], t, rope)
            head_outputs.append(attend(query, keys[kv][first : t + 1], values[kv][first : t + 1]))
        partial.append(wo @ np.concatenate(head_outputs))
    return partial


def lane_mlp(w: Weights, layer: int, lane: int, x: list[np.ndarray]) -> list[np.ndarray]:
    w1, w2, w3 = (
        w[f"layers.{layer}.feed_forward.{name}.weight"][lane] for name in ("w1", "w2", "w3")
    )
    return [w2 @ ((w1 @ row) / (1 + np.exp(-(w1 @ row))) * (w3 @ row)) for row in x]


def update(
    c: LaneformerConfig,
    h: np.ndarray,
    outputs: list[np.ndarray],
    layer: int,
    comm: bool,
    plant: str,
) -> None:
    """Add one module's partials to the streams h (S, L, D) in place."""
    # outputs: this module's partials, layer by layer
    p, lanes = outputs[layer], c.num_lanes
    delay = c.broadcast_delay
    first = c.first_late_layer + (plant == "border")
    waiting = min(delay, c.early_layers or delay) if c.use_early_comm else 0
    # PRESENT, if the module talks
    early = [i < max(first, waiting) for i in range(c.num_hidden_layers)]
    source = layer - delay + (1 if plant == "delay" and delay > 1 else 0)
    for t in range(h.shape[0]):
        for lane in range(lanes):
            if not comm or (layer < delay and not early[layer]):
                h[t, lane] += np.sqrt(lanes) * p[t, lane]
            elif early[layer]:
                h[t, lane] += sum(p[t, other] for other in range(lanes))
            else:
                h[t, lane] += p[t, lane]
                if early[source] and not c.rebroadcast_early:
                    continue
                for other in range(lanes):
                    one_partial = (layer, t, lane, other) == (c.num_hidden_layers - 1, 3, 0, 1)
                    dropped = plant == "remote" and one_partial
                    if other != lane and not dropped:
                        h[t, lane] += outputs[source][t, other]


def head(c: LaneformerConfig, w: Weights, streams: np.ndarray) -> np.ndarray:
    """Return the logits (V,) of one token from its lanes' streams (L, D)."""
    scale, weight, lanes = w["norm.weight"], w["lm_head.weight"], range(c.num_lanes)
    normed = [rms_norm(streams[lane], scale, lane, c.norm_eps) for lane in lanes]
    if c.lm_head_type == "vocab_parallel":
        return np.concatenate([weight[lane] @ normed[lane] for lane in lanes])
    if c.lm_head_type == "lane":
        # each lane's head reads only its own columns of its normed stream
        width = c.hidden_size // c.num_lanes
        return sum(weight[lane] @ normed[lane][lane * width : (lane + 1) * width] for lane in lanes)
    if c.pre_norm_lane_agg:
        # the lanes' streams are summed before the norm, else after it
        total = sum(streams[lane] for lane in lanes)
        return weight @ (
            sum(rms_norm(total, scale, lane, c.norm_eps) for lane in lanes) / c.num_lanes
        )
    return weight @ (sum(normed) / c.num_lanes)


def reference_logits(
    c: LaneformerConfig, w: Weights, ids: list[int], plant: str = ""
) -> np.ndarray:
    """Return the logits (S, V) of one sequence in float64.

    Args:
        plant: "", "remote" (one partial lost), "delay", "window", "flush" (left out) or "border"
            (one late layer less).
    """
    return np.array([head(c, w, streams) for streams in reference_streams(c, w, ids, plant)[0]])


def reference_streams(
    c: LaneformerConfig, w: Weights, ids: list[int], plant: str = ""
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Return the streams (S, L, D) after the last layer, then all layers' attention and MLP partials."""
    h = np.array([[w["tok_embeddings.weight"][token] for _ in range(c.num_lanes)] for token in ids])
    attention_outputs: list[np.ndarray] = []
    mlp_outputs: list[np.ndarray] = []
    for i in range(c.num_hidden_layers):
        window = c.sliding_window + (plant == "window") if i in c.swa_layers else None
        for module, outputs in (("attention", attention_outputs), ("mlp", mlp_outputs)):
            scale = w[f"layers.{i}.{'attention' if module == 'attention' else 'ffn'}_norm.weight"]
            partial = np.empty_like(h)
            for lane in range(c.num_lanes):
                x = [rms_norm(row[lane], scale, lane, c.norm_eps) for row in h]
                if module == "attention":
                    partial[:, lane] = lane_attention(c, w, i, lane, x, window)
                else:
                    partial[:, lane] = lane_mlp(w, i, lane, x)
            outputs.append(partial)
            update(
                c,
                h,
                outputs,
                i,
                c.use_attention_comm if module == "attention" else c.use_mlp_comm,
                plant,
            )
    if c.flush and plant != "flush":
        h = h + tail(c, attention_outputs, mlp_outputs)
    return h, attention_outputs, mlp_outputs


def tail(c: LaneformerConfig, *outputs: list[np.ndarray]) -> np.ndarray:
    """Return the sum (S, L, D) of other lanes' partials that no layer is left to receive."""
    missing = np.zeros_like(outputs[0][0])
    first = max(c.broadcast_delay, c.first_late_layer, c.num_hidden_layers - c.broadcast_delay)
    for module, comm in zip(outputs, (c.use_attention_comm, c.use_mlp_comm), strict=True):
        for partial in module[first:] if comm else ():
            missing += partial.sum(1, keepdims=True) - partial
    return missing


def reference_drafts(
    c: LaneformerConfig, w: Weights, ids: list[int], at: int, steps: int, plant: str = ""
) -> list[np.ndarray]:
    """Return the head's logits (V,) for tokens at+2 to at+steps+1, each given the tokens before it.

    Args:
        plant: "", "tail" (leave out what never arrived) or "token" (read the wrong token).
    """
    h, *outputs = reference_streams(c, w, ids[: at + 1])
    if c.deliver_tail and not c.flush and plant != "tail":
        h = h + tail(c, *outputs)
    embedding, shift = w["tok_embeddings.weight"], plant != "token"
    columns = [block_input(c, w, h[t], embedding[ids[t + shift]]) for t in range(at + 1)]
    logits = []
    # one pass after the other, as an engine drafts
    for k in range(1, steps + 1):
        y = draft_block(c, w, columns)[-1]
        logits.append(head(c, w | {"norm.weight": w["mtp.norm.weight"]}, y))
        if k < steps:
            columns.append(block_input(c, w, y, embedding[ids[at + k + shift]]))
    return logits


def block_input(
    c: LaneformerConfig, w: Weights, h: np.ndarray, embedding: np.ndarray
) -> np.ndarray:
    hidden, token = w["mtp.hidden_norm.weight"], w["mtp.embedding_norm.weight"]
    lanes, eps = range(c.num_lanes), c.norm_eps
    return np.array(
        [rms_norm(h[i], hidden, i, eps) + rms_norm(embedding, token, i, eps) for i in lanes]
    )


def draft_block(c: LaneformerConfig, w: Weights, columns: list[np.ndarray]) -> np.ndarray:
    """Return the output streams (columns, L, D) of the MTP block, whose lanes wait for each other."""
    n, h = c.num_hidden_layers, np.array(columns)
    w = w | {f"layers.{n}.{name.removeprefix('mtp.layer.')}": weight for name, weight in w.items()}
    for norm in ("attention_norm", "ffn_norm"):
        partials = []
        for lane in range(c.num_lanes):
            x = [rms_norm(row[lane], w[f"layers.{n}.{norm}.weight"], lane, c.norm_eps) for row in h]
            attention = norm == "attention_norm"
            partials.append(
                lane_attention(c, w, n, lane, x, None) if attention else lane_mlp(w, n, lane, x)
            )
        h = h + np.array(partials).sum(0)[:, None]
    return h
