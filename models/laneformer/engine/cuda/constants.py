"""Write the geometry as C++ text in front of the kernels: sizes, and tables by layer or matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...config import LaneformerConfig
from ...joins import MODULES, Join
from .geometry import OPS, Geometry
from .structures import MAX_COLUMNS, MAX_STOPS


def constants_of(geometry: Geometry) -> str:
    c, layers = geometry.config, range(geometry.config.num_hidden_layers)
    starts = [sum(geometry.kv_layer(j) for j in range(i)) for i in layers]
    lines = [
        f"#define DEVICES {geometry.devices}",
        f"#define WEIGHTS_BF16 {int(geometry.half == 'bf16')}",
        f"#define WEIGHTS_INT8 {int(geometry.dtype == 'int8')}",
        "#ifndef TABLE\n#define TABLE __constant__ constexpr  // read with an index of run time\n#endif",
        f"enum Join {braces(map(join_name, Join))};",
        *(f"constexpr int {name} = {value};" for name, value in sizes_of(geometry).items()),
        f"constexpr float kNormEps = {c.norm_eps!r}f, kSqrtLanes = {math.sqrt(c.num_lanes)!r}f;",
        f"constexpr long long kKvLane = {geometry.kv_lane};",
        f"TABLE long long kKvAt[] = {braces(starts)};",
        *(
            f"TABLE int {name}[] = {braces(values)};"
            for name, values in tables_of(geometry).items()
        ),
        *(
            f"TABLE int {name}[2][kLayers] = {braces(map(braces, rows))};"
            for name, rows in module_tables_of(c).items()
        ),
    ]
    return "\n".join(lines) + "\n"


def sizes_of(geometry: Geometry) -> dict[str, int]:
    c = geometry.config
    return {
        "kLanes": c.num_lanes,
        "kDeviceLanes": geometry.lanes_per_device,
        "kHidden": c.hidden_size,
        "kIntermediate": c.intermediate_size // c.num_lanes,
        "kHeads": geometry.heads,
        "kKvHeads": c.kv_heads_per_lane,
        "kHeadDim": c.head_dim,
        "kVocab": c.vocab_size // c.num_lanes,
        "kLayers": c.num_hidden_layers,
        "kDelay": c.broadcast_delay,
        "kLaneNorms": int(not c.replicated_rmsn_scale),
        "kQkvBias": int(c.attention_bias),
        "kHeadNorms": int(c.qk_norm),
        "kBlocksPerLane": geometry.blocks_per_lane,
        "kWarps": geometry.warps,
        "kChunkBytes": geometry.chunk_bytes,
        "kChunks": geometry.chunks,
        "kStrip": geometry.strip,
        "kSplits": geometry.splits,
        "kMailSlots": geometry.mail_slots,
        "kWide": geometry.wide,
        "kNarrow": geometry.narrow,
        "kMostStreamRows": geometry.stream_rows,
        "kMostStops": MAX_STOPS,
        "kMmaColumns": geometry.columns,
        "kMostColumns": MAX_COLUMNS,
        "kMostSums": geometry.max_sums,
        "kFlushes": len(geometry.flush_points),
    }


def tables_of(geometry: Geometry) -> dict[str, Sequence[int]]:
    """Return the tables with a number for each matrix, layer or flush."""
    c, layers = geometry.config, range(geometry.config.num_hidden_layers)
    matrices = [geometry.matrix(op) for op in OPS]
    return {
        "kColumns": [m.columns for m in matrices],
        "kUnits": [m.units for m in matrices],
        "kParts": [m.parts for m in matrices],
        "kWindows": [c.window(i) or 0 for i in layers],
        "kKvSlots": [geometry.kv_slots(i) for i in layers],
        "kTurnsFrom": [
            0 if i in c.nope_layers else 1 + c.rope_of(i) * c.max_position_embeddings
            for i in layers
        ],
        "kFlushed": [2 * i + m for i, m in geometry.flush_points] or [0],
    }


def module_tables_of(config: LaneformerConfig) -> dict[str, Sequence[Sequence[object]]]:
    """Return the tables with a row for each of MODULES and a column a layer."""
    c, layers = config, range(config.num_hidden_layers)
    return {
        "kJoins": [[join_name(c.join(i, m)) for i in layers] for m in MODULES],
        "kAddsDelayed": [[int(c.adds_delayed(i, m)) for i in layers] for m in MODULES],
        "kBroadcasts": [
            [int(c.broadcasts(i, m) or c.delivers(i, m)) for i in layers] for m in MODULES
        ],
    }


def join_name(join: Join) -> str:
    return "k" + join.name.title().replace("_", "")


def braces(values: Iterable[object]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"
