"""`python -m tools.bench NAME ...`: one benchmark; `python -m tools.bench NAME --help` lists its options."""

from __future__ import annotations

import importlib
import sys

from tools.bench import harness

BENCHMARKS = {
    "decode": "decode speed on the CPU, alternating with llama.cpp and Transformers",
    "latency": "what the delay hides: tokens/s against an injected latency of the link between lanes",
    "train": "training speed, alternating with TorchTitan's Llama",
    "cuda": "correctness and speed of the CUDA engine",
}


def main(arguments: list[str] | None = None) -> None:
    name, *options = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name not in BENCHMARKS:
        lines = "\n".join(f"  {each:14}{about}" for each, about in BENCHMARKS.items())
        print(f"usage: python -m tools.bench NAME [--help] ...\n\n{lines}", file=sys.stderr)
        raise SystemExit(0 if name in ("-h", "--help") else 2)
    benchmark = importlib.import_module(f"tools.bench.{name}")
    if name == "cuda":  # its machine may have no package of the command line
        benchmark.main(options)
    else:
        from records.command import run_command

        run_command(name, lambda: harness.run(name, benchmark, options), status=2)


if __name__ == "__main__":
    main()
