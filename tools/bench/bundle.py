"""`python -m tools.bench cuda --bundle FILE`: one file that runs and measures the CUDA engine on a bare
machine.

A zip archive that Python executes (tools/bench/bare): machine code of the engine's kernels for every planned
card, the shapes of their launches, and a reference of two models whose weights are a rule (rule.py, fill.cu).
Making it needs PyTorch, Transformers and NVRTC, no GPU; code is of the newest compiler of each CUDA
generation that is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda.bench import weight_bytes
from laneformer.engine.cuda.compile import compile_cubin
from laneformer.engine.cuda.geometry import WARP_THREADS, Geometry, Machine, architecture_name
from laneformer.engine.cuda.memory import turns
from laneformer.engine.cuda.nvrtc import Nvrtc, compilers
from laneformer.engine.cuda.planning import plan_builds
from laneformer.engine.cuda.structures import TRACED
from laneformer.engine.cuda.tape import tape_starts
from tools.bench import harness
from tools.bench.bare.contents import DESCRIPTION
from tools.bench.bare.main import VERDICTS
from tools.bench.compiling import in_order
from tools.bench.planned import CARDS
from tools.bench.rule import exponents, weights_by_rule
from tools.check.cuda import NEW_TOKENS, PROMPT_LENGTHS, reference, scored_length
from tools.check.reference import chosen_positions, random_prompts

MOST_BYTES = 32 << 20
COMPILE_S = 3600.0
EFFORT = {  # what the steps take, and how long a launch and a step may
    "runs": 20, "trials": 5, "rounds": 2000, "read_rounds": 1000, "probed_bytes": 8 << 30, "tokens": 256,
    "launch_s": 20.0,
    "limits_s": {"machine": 60.0, "tiny": 120.0, "300m": 240.0, "probe": 90.0, "latency": 90.0, "decode": 120.0,
                 "trace": 90.0},
}  # fmt: skip
SOURCES = {  # folder of the checkout -> what the bundle imports
    "models": (
        "laneformer/__init__.py", "laneformer/config.py", "laneformer/ropes.py", "laneformer/variant.py",
        "laneformer/engine/__init__.py", "laneformer/engine/sampling.py", "laneformer/engine/cuda/__init__.py",
        "laneformer/engine/cuda/structures.py", "laneformer/engine/cuda/bandwidth.py",
    ),
    ".": ("tools/__init__.py", "tools/bench/__init__.py", "tools/bench/bare/*.py"),
}  # fmt: skip
MAIN = """import sys

if sys.version_info < (3, 10):
    raise SystemExit("this needs Python 3.10 or newer; here is " + sys.version.split()[0])
from tools.bench.bare.main import main

main()
"""
Facts = dict[str, Any]
Models = Mapping[str, LaneformerConfig]
Compile = Callable[[str, Geometry, str, Nvrtc | None], bytes]


def compiled(unit: str, geometry: Geometry, architecture: str, compiler: Nvrtc | None) -> bytes:
    return compile_cubin(unit, geometry, architecture, compiler=compiler)


class Bundle:
    """The archive under way. Of the last model everything is measured. `shape`: for planning.plan_builds,
    beside what the card decides.
    """

    def __init__(self, path: Path, models: Models, compile: Compile = compiled, **shape: Any):
        self.models, self._compile, self._shape = models, compile, shape
        self._path = path

    @functools.cached_property
    def _zip(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self._path, "w", zipfile.ZIP_DEFLATED, compresslevel=9)

    def add(self, content: bytes, kind: str) -> str:
        """The name of a file with this content; equal ones are packed once."""
        name = f"{kind}/{hashlib.sha256(content).hexdigest()[:16]}"
        if name not in self._zip.namelist():
            self._zip.writestr(name, content)
        return name

    def builds(self, machine: Machine, config: LaneformerConfig) -> list[Geometry]:
        return plan_builds(config, "bf16", machine, **self._shape)

    def units(self, machine: Machine, config: LaneformerConfig) -> dict[str, tuple[str, Geometry]]:
        """What is compiled of a model: its name in the description, and compile_cubin's."""
        builds = self.builds(machine, config)
        passes = {f"passes {g.columns}": ("passes", g) for g in builds}
        of_memory = {unit: (unit, builds[-1]) for unit in ("fill", "probe")}
        measured = config == [*self.models.values()][-1]
        return {**passes, **of_memory, **({"traced": ("traced", builds[0])} if measured else {})}

    def card(self, name: str, machine: Machine, by_major: Mapping[int, Nvrtc | None]) -> Facts:
        models = {flavor: self.model(machine, config, by_major) for flavor, config in self.models.items()}
        facts = {"name": name}
        return {**facts, **dataclasses.asdict(machine), "compilers": [*by_major], "models": models}

    def model(
        self, machine: Machine, config: LaneformerConfig, by_major: Mapping[int, Nvrtc | None]
    ) -> Facts:
        code = {
            key: {
                major: self.add(
                    self._compile(*unit, architecture_name(machine.architecture), compiler), "code"
                )
                for major, compiler in by_major.items()
            }
            for key, unit in self.units(machine, config).items()
        }
        files = {"rope": self.add(turns(config).numpy().astype("<f4").tobytes(), "tables")}
        return {**self.shape(self.builds(machine, config)), **files, "code": code}

    def shape(self, builds: list[Geometry]) -> Facts:
        """Sizes of the launches and of the memory, as memory.DeviceMemory has it for one sequence."""
        g, config = builds[-1], builds[-1].config
        starts = tape_starts(g)
        norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
        norms *= 1 if config.replicated_rmsn_scale else config.num_lanes
        return {
            "builds": [
                {"columns": b.columns, "unit": f"passes {b.columns}", "shared_bytes": b.shared_bytes} for b in builds
            ],
            "columns": g.columns, "blocks": g.blocks, "threads": g.threads, "warp_threads": WARP_THREADS,
            "chunk_bytes": g.chunk_bytes, "probe_shared_bytes": g.shared_bytes,
            "vocab_size": config.vocab_size, "layers": config.num_hidden_layers,
            "context": config.max_position_embeddings, "exponents": exponents(config, g),
            "weight_bytes": weight_bytes(g), "tape_bytes": int(starts[-1]),
            "position_bytes": config.cached_bytes(1, 2), "tape_at": self.add(starts.astype("<u8").tobytes(), "tables"),
            "bytes": {
                "tapes": int(starts[-1]), "embedding": 2 * config.vocab_size * config.hidden_size, "norms": 4 * norms,
                "kv": 2 * g.lanes_per_device * g.kv_lane, "lane_words": 8 * g.columns * g.device_words,
                "inbox": 8 * g.columns * g.inbox_words, "aborted": 4, "logits": 4 * config.vocab_size * g.columns,
                "sums": 4 * g.blocks * g.threads, "words": 8 * 2 * config.hidden_size, "flags": 16,
                "trace": 8 * len(TRACED) * g.blocks,
            },
        }  # fmt: skip

    def reference(
        self, config: LaneformerConfig, geometry: Geometry, prompts: int = 8, new_tokens: int = NEW_TOKENS
    ) -> Facts:
        """Transformers' logits and greedy tokens in float32, and how far its bf16 is from them."""
        weights, total = weights_by_rule(config, geometry)
        length = scored_length(config)
        positions = chosen_positions(config, length)
        asked = random_prompts(config, prompts, PROMPT_LENGTHS, new_tokens)
        truth = reference(config, weights, length, positions, asked, new_tokens)
        return {
            "ids": truth.ids, "positions": positions, "error": truth.error, "kl": truth.kl, "worst": truth.worst,
            "logits": self.add(truth.logits.astype("<f4").tobytes(), "logits"), "tape_sum": total,
            "greedy": [(prompt, *truth.continuations[tuple(prompt)]) for prompt in asked],
        }  # fmt: skip

    def close(self, description: Facts) -> None:
        self._zip.writestr(DESCRIPTION, json.dumps(description))
        for folder, patterns in SOURCES.items():
            root = harness.ROOT / folder
            for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
                self._zip.write(path, path.relative_to(root))
        self._zip.writestr("__main__.py", MAIN)
        self._zip.close()


def newest_by_major() -> dict[int, Nvrtc]:
    """Code of CUDA 12 runs on drivers for 12 and 13; what is of 13 on the latter alone. RuntimeError: none is
    here.
    """
    found: dict[int, Nvrtc] = {}
    for compiler in compilers():
        found.setdefault(compiler.version[0], compiler)
    if not found:
        raise RuntimeError(
            "no compiler (NVRTC) is installed: pip install nvidia-cuda-nvrtc nvidia-cuda-nvrtc-cu12"
        )
    return found


def compile_first(bundle: Bundle, cards: Mapping[str, Machine], by_major: Mapping[int, Nvrtc]) -> None:
    """Fill the cache of machine code, on all cores; RuntimeError names what does not compile."""
    jobs = {
        f"{key} of {flavor} for {name}, CUDA {major}": functools.partial(
            compiled, *unit, architecture_name(machine.architecture), compiler
        )
        for name, machine in cards.items()
        for flavor, config in bundle.models.items()
        for key, unit in bundle.units(machine, config).items()
        for major, compiler in by_major.items()
    }
    done = in_order(jobs, COMPILE_S)
    if (done["late"], done["failed"]) != ("none", "none"):
        raise RuntimeError(f"kernels that do not compile: {done['failed']}; late: {done['late']}")


def main(path: Path, options: argparse.Namespace) -> None:
    """Write the bundle; RuntimeError where it would be larger than a file that can be copied anywhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    try:
        write(unfinished, options)
        if (size := unfinished.stat().st_size) > MOST_BYTES:
            raise RuntimeError(
                f"{path} would have {size:,} bytes, more than {MOST_BYTES:,}; pack fewer compilers"
            )
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    print(json.dumps({"bundle": str(path), "bytes": size, "cards": [*CARDS]}))


def write(path: Path, options: argparse.Namespace) -> None:
    models = {name: LaneformerConfig.from_flavor(name) for name in VERDICTS[1:]}
    bundle, by_major = Bundle(path, models), newest_by_major()
    machines = {name: card.machine for name, card in CARDS.items()}
    compile_first(bundle, machines, by_major)
    stamp = harness.stamp("cuda", [])
    first = next(iter(machines.values()))
    bundle.close({
        "effort": EFFORT, "measured": VERDICTS[-1],
        "made": f"{stamp['date']}, commit {options.commit or stamp['commit']}, NVRTC "
        + ", ".join(".".join(map(str, c.version)) for c in by_major.values()),
        "cards": [bundle.card(name, machine, by_major) for name, machine in machines.items()],
        "references": {n: bundle.reference(c, bundle.builds(first, c)[-1]) for n, c in models.items()},
    })  # fmt: skip
