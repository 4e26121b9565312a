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

from .chat import SYSTEM, USER, ChatTemplate
from .engine import Engine, GenerationOptions
from .tensors import MatrixDtype

Dtype = Literal["auto"] | MatrixDtype
Math = Literal["auto", "exact", "bf16", "int8"]
KvDtype = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass
class Generate:
    """Stream text from a model: the prompt's continuation, as it is decoded.

    Temperature, top-k, top-p, min-p and repetition penalty default to the model's generation_config.json, as in
    Transformers, and without one to greedy decoding; --greedy turns that file's sampling off.
    """

    hf_dir: tyro.conf.Positional[Path]
    """Folder with config.json, model*.safetensors and tokenizer.json, or a GGUF file."""
    prompt: str
    """Text to continue, or with --chat the message to reply to."""
    chat: bool = False
    """Send the prompt as a user's message in the model's own chat template."""
    system: str | None = None
    """With --chat: a system message before it."""
    greedy: bool = False
    """Always the likeliest token, whatever the model's generation_config.json says."""
    max_new_tokens: int = 128
    temperature: float | None = None
    """0 is greedy."""
    top_k: int | None = None
    """0 is off."""
    top_p: float | None = None
    """Draw from the fewest likely tokens that reach this probability; 1 is off."""
    min_p: float | None = None
    """Draw from tokens at least this many times as likely as the likeliest; 0 is off."""
    repetition_penalty: float | None = None
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
    """Type of the matrices; auto: the checkpoint's. int8 reads half the bytes of 16 bits, int4 not much more than a
    quarter; the output may change."""
    math: Math = "auto"
    """bf16 and int8 round activations before every matrix product, which reads prompts faster; auto: exact, and int8
    for int4 weights. CPU only."""
    kv_dtype: KvDtype = "auto"
    """Type of cached keys and values; auto: fp32 for fp32 weights, else fp16. CPU only."""
    threads: int | None = None
    """Threads of the CPU engine; default: all cores, in equal groups where they outnumber the lanes."""
    pin: bool | None = None
    """Keep each thread on a CPU of its own; default: where the machine has several memory nodes."""
    lanes: int | None = None
    """Lanes of a Llama-family model; default: as suit the threads. A Laneformer has its own."""
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
    math: Math = "auto"
    """bf16 and int8 round activations before every matrix product; auto: exact, and int8 for int4 weights."""
    kv_dtype: KvDtype = "auto"
    """Type of cached keys and values; auto: fp32 for fp32 weights, else fp16. CPU only."""
    depth: tuple[int, ...] = (0,)
    """Cached positions before the measured tokens; given several, the JSON has all but the first under "depths"."""
    barriers: bool = False
    """Also measure decoding with a barrier after every module, alternating with normal decoding. CPU only."""
    threads: int | None = None
    """Threads of the CPU engine; default: all cores, in equal groups where they outnumber the lanes."""
    pin: bool | None = None
    """Keep each thread on a CPU of its own; default: where the machine has several memory nodes."""
    lanes: int | None = None
    """Lanes of a Llama-family model; default: as suit the threads. A Laneformer has its own."""
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
    options = {name: value for name in names if (value := getattr(command, name)) is not None}
    GenerationOptions(**options)  # errors show before the weights are loaded
    if command.system is not None and not command.chat:
        raise ValueError("--system is a message of a conversation; add --chat")
    if command.greedy and options.get("temperature"):
        raise ValueError(f"--greedy and --temperature {command.temperature} contradict each other; give one of them")
    names = ["device", "dtype", "math", "kv_dtype", "threads", "pin", "cache", "lanes"]
    wanted: dict[str, Any] = {name: getattr(command, name) for name in names}
    with Engine.from_pretrained(command.hf_dir, **wanted) as engine:
        prompt = conversation(engine, command.prompt, command.system) if command.chat else command.prompt
        defaults = {} if command.greedy else {n: v for n, v in engine.sampling_defaults.items() if n not in options}
        if defaults:
            listing = ", ".join(f"{name} {value}" for name, value in defaults.items())
            print(f"from the model's generation_config.json: {listing} (--greedy turns it off)", file=sys.stderr)
        for piece in engine.stream_text(prompt, stop=command.stop, **defaults, **options):
            print(piece, end="", flush=True)
        print(flush=True)
        if command.speculate:
            figures = engine.statistics
            print(f"{figures.accepted_tokens} of {figures.proposed_tokens} draft tokens were right", file=sys.stderr)


def conversation(engine: Engine, prompt: str, system: str | None) -> list[int]:
    """The ids of one user's message, after a system message, up to where the model replies."""
    messages = [{"role": SYSTEM, "content": system}] if system is not None else []
    messages.append({"role": USER, "content": prompt})
    text = ChatTemplate(engine.tokenizer_config).render(messages, add_generation_prompt=True)
    if engine.tokenizer is None:
        raise ValueError("a conversation needs a tokenizer, but the model has none")
    return engine.tokenizer.encode(text, add_special_tokens=False).ids


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
    options: dict[str, Any] = {
        name: getattr(command, name) for name in ("device", "threads", "math", "pin", "kv_dtype")
    }
    if command.hf_dir is not None:
        options |= {"dtype": command.dtype, "cache": command.cache, "lanes": command.lanes}
        return Engine.from_pretrained(command.hf_dir, **options)
    dtype = "bf16" if command.dtype == "auto" else command.dtype
    return Engine.random(command.random_weights or "", dtype, **options)


if __name__ == "__main__":
    main()
