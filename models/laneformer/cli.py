"""The `laneformer` command: generate text from an exported folder, and measure decode speed."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from .engine import Engine, GenerationOptions
from .tensors import MatrixDtype

Dtype = Literal["auto"] | MatrixDtype


@dataclass
class Generate:
    """Stream text from a model folder: the prompt's continuation, as it is decoded."""

    hf_dir: tyro.conf.Positional[Path]
    """Folder with config.json, model*.safetensors and tokenizer.json."""
    prompt: str
    """Text to continue."""
    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """Draw from the fewest likely tokens that reach this probability; 1 is off."""
    min_p: float = 0.0
    """Draw from tokens at least this many times as likely as the likeliest; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in the prompt or the output; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the output."""
    seed: int = 0
    """The same seed and prompt give the same text."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to end before; may be given several times."""
    min_new_tokens: int = 0
    """No end of text before this many tokens."""
    ignore_eos: bool = False
    """Continue after the model's end-of-text token."""
    speculate: int = 0
    """Most draft tokens, taken from earlier text, to verify in one pass; the output stays the same. CPU only."""
    device: str = "auto"
    """auto, cpu, cuda, or several GPUs: cuda:0,cuda:1. On GPUs there are no penalties and no --min-new-tokens."""
    dtype: Dtype = "auto"
    """Type of the matrices; auto: the checkpoint's. int8 reads half the bytes of 16 bits; the output may change."""
    threads: int | None = None
    """Threads of the CPU engine; default: all cores, in equal groups where they outnumber the lanes."""
    pin: bool = False
    """Keep each thread on a CPU of its own."""
    cache: bool = True
    """Keep the packed weights on disk, beside the model or in the user's cache directory, for the next start."""


@dataclass
class Bench:
    """Measure decode speed and, in between, read bandwidth; the last line of stdout is JSON."""

    hf_dir: tyro.conf.Positional[Path | None] = None
    """Model folder; or use --random-weights."""
    random_weights: Literal["2b", "300m", "tiny"] | None = None
    """Random weights of this flavor instead of a model folder."""
    device: str = "auto"
    """auto, cpu, cuda, or several GPUs: cuda:0,cuda:1."""
    dtype: Dtype = "auto"
    """Type of the matrices; auto: the checkpoint's, or bf16 for random weights."""
    math: Literal["exact", "bf16"] = "exact"
    """bf16 rounds activations to bf16 before every matrix product."""
    depth: tuple[int, ...] = (0,)
    """Cached positions before the measured tokens; given several, the JSON has all but the first under "depths"."""
    barriers: bool = False
    """Also measure decoding with a barrier after every module, alternating with normal decoding. CPU only."""
    threads: int | None = None
    """Threads of the CPU engine; default: all cores, in equal groups where they outnumber the lanes."""
    pin: bool = False
    """Keep each thread on a CPU of its own."""
    cache: bool = True
    """Keep the packed weights of a folder on disk for the next start."""
    json: bool = False
    """Print nothing but the JSON line."""


Command = Annotated[Generate, tyro.conf.subcommand("generate")] | Annotated[Bench, tyro.conf.subcommand("bench")]


def main(arguments: list[str] | None = None) -> None:
    """Run one subcommand; a user error prints one line and exits with status 2."""
    command = tyro.cli(Command, args=arguments, prog="laneformer", description=__doc__)
    try:
        generate(command) if isinstance(command, Generate) else bench(command)
    except ValueError as error:
        print(f"laneformer: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def generate(command: Generate) -> None:
    names = [field.name for field in dataclasses.fields(GenerationOptions) if hasattr(command, field.name)]
    options = {name: getattr(command, name) for name in names}
    GenerationOptions(**options)  # errors show before the weights are loaded
    wanted: dict[str, Any] = {name: getattr(command, name) for name in ("device", "dtype", "threads", "pin", "cache")}
    with Engine.from_pretrained(command.hf_dir, **wanted) as engine:
        for piece in engine.stream_text(command.prompt, stop=command.stop, **options):
            print(piece, end="", flush=True)
        print(flush=True)
        if command.speculate:
            figures = engine.statistics
            print(f"{figures.accepted_tokens} of {figures.proposed_tokens} draft tokens were right", file=sys.stderr)


def bench(command: Bench) -> None:
    from .engine.bench import benchmark

    console = Console(stderr=True, quiet=command.json)
    if (command.hf_dir is None) == (command.random_weights is None):
        raise ValueError("give either a model folder or --random-weights")
    with console.status("loading weights"):
        engine = open_engine(command)
    with engine, console.status("measuring"):
        figures, *deeper = [
            benchmark(engine, depth, lambda line: console.print(line, style="dim"), command.barriers)
            for depth in command.depth or (0,)
        ]
    figures |= {"depths": deeper} if deeper else {}
    figures["model"] = command.random_weights or str(command.hf_dir)
    if not command.json:
        reader = f"{figures['threads']} threads" if "threads" in figures else figures["device"]
        console.print(
            f"{figures['dtype']}: [bold]{figures['tokens_per_s']:.1f}[/] tokens/s = "
            f"[bold]{figures['percent_of_probe']:.0f}%[/] of the {figures['probe_bytes_per_s'] / 1e9:.1f} GB/s that "
            f"{reader} read just then; "
            f"prefill {figures['prefill_tokens_per_s']:.0f} tokens/s, first token after {figures['ttft_s']:.3f} s"
        )
    print(json.dumps(figures))


def open_engine(command: Bench) -> Engine:
    options: dict[str, Any] = {name: getattr(command, name) for name in ("device", "threads", "math", "pin")}
    if command.hf_dir is not None:
        return Engine.from_pretrained(command.hf_dir, dtype=command.dtype, cache=command.cache, **options)
    dtype = "bf16" if command.dtype == "auto" else command.dtype
    return Engine.random(command.random_weights or "", dtype, **options)


if __name__ == "__main__":
    main()
