"""Export a training checkpoint (torch DCP) as a Hugging Face folder that loads without this package.

    python -m laneformer.hf.export --checkpoint runs/demo/phase2/checkpoint/step-150 --out runs/demo/hf

The folder is loaded back through Transformers and compared with the plain PyTorch model before it gets
its name. Architecture, tokenizer and chat template come from the run folder (two levels above the
checkpoint) unless given; a run without a template gets the published one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
import tyro
from huggingface_hub import split_torch_state_dict_into_shards
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from ..config import DRAFT_IDS, MTP, LaneformerConfig, hf_name
from ..model import Laneformer
from ..tensors import check_shapes
from .tokenizer import CHAT_TEMPLATE, list_token_ids, write_tokenizer

DType = Literal["bfloat16", "float16", "float32"]
MAX_SHARD_BYTES = 4_000_000_000
AUTO_MAP = {
    "AutoConfig": "configuration_laneformer.LaneformerHFConfig",
    "AutoModel": "modeling_laneformer.LaneformerModel",
    "AutoModelForCausalLM": "modeling_laneformer.LaneformerForCausalLM",
}
CODE = (
    "cache.py",
    "config.py",
    "initialization.py",
    "joins.py",
    "lanes.py",
    "model.py",
    "mtp.py",
    "positions.py",
    "ropes.py",
    "hf/configuration_laneformer.py",
    "hf/modeling_laneformer.py",
)
CHAT = "only `user` and `assistant` messages; system messages are ignored"
CHAT_WITH_TOOLS = "system messages, tools, their calls and results (role `tool`), as the model was trained on them"
console = Console(stderr=True)
# a single process is intended
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass(frozen=True)
class Progress:
    """How far the exported checkpoint was trained; None where it is not known."""

    step: int | None = None
    """training step"""
    phase: str | None = None
    """name of the training phase"""
    tokens_total: int | None = None
    """training tokens, earlier phases included"""
    loss: float | None = None
    """training loss at that step, nats per token"""


def export(
    checkpoint: Path,
    out: Path,
    dtype: DType = "bfloat16",
    config: Path | None = None,
    tokenizer: Path | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = Progress(),
    draft_ids: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Write the Hugging Face folder `out`.

    Args:
        checkpoint: torch DCP folder, `runs/<name>/checkpoint/step-N`.
        out: folder to create.
        dtype: dtype of the weights in `out`.
        config: path of `model.json`; default: the run folder's.
        tokenizer: path of `tokenizer.model` (SentencePiece) or `tokenizer.json`; default: the run folder's.
        overwrite: replace `out` if it is not empty.
        max_shard_bytes: largest safetensors file; larger models are split.
        progress: training progress for the model card; the step defaults to the checkpoint's name.
        draft_ids: ids that the head for multi-token prediction may draft; none for the whole vocabulary.

    Returns:
        out, step, parameters, dtype, weight_bytes, hf_max_logit_diff (both in float32 compute), seconds.
    """
    started = time.monotonic()
    run_folder = locate_checkpoint(checkpoint).parent.parent
    config_path = config or run_folder / "model.json"
    tokenizer_path = tokenizer or locate_tokenizer(run_folder)
    require({"--config": config_path, "--tokenizer": tokenizer_path})
    architecture = LaneformerConfig.from_dict(json.loads(config_path.read_text()))
    if progress.step is None:
        progress = replace(progress, step=checkpoint_step(checkpoint))
    with stage_folder(out, overwrite) as folder:
        console.print(f"reading {checkpoint}")
        weights = load_weights(checkpoint, architecture)
        # one at a time, in place: two copies of a large model may not fit in memory
        for name in weights:
            weights[name] = round_weight(name, weights[name], dtype)
        if draft_ids:
            weights[DRAFT_IDS] = torch.tensor(sorted(draft_ids), dtype=torch.int32)
            architecture = replace(architecture, draft_vocab_size=len(draft_ids))
        console.print(f"writing {folder}")
        write_weights(folder, weights, max_shard_bytes)
        special, token_ids = copy_tokenizer(tokenizer_path, folder, architecture, run_folder)
        write_configs(folder, architecture, dtype, token_ids)
        write_card(folder, architecture, dtype, progress, special)
        console.print("loading it back and comparing its logits with the training model's")
        difference = verify(folder, architecture, weights)
    return {
        "out": str(out),
        "step": progress.step,
        "parameters": sum(w.numel() for name, w in weights.items() if name != DRAFT_IDS),
        "dtype": dtype,
        "weight_bytes": sum(w.nbytes for w in weights.values()),
        "hf_max_logit_diff": difference,
        "seconds": round(time.monotonic() - started, 2),
    }


def require(paths: dict[str, Path]) -> None:
    for option, path in paths.items():
        if not path.is_file():
            raise ValueError(f"{path} does not exist; pass its path with {option}")


def copy_tokenizer(
    path: Path, folder: Path, config: LaneformerConfig, run_folder: Path
) -> tuple[dict[str, str], dict[str, int]]:
    """Write the tokenizer's files; return its special tokens and the ids that config.json names."""
    # the run's chat template, or else the published one
    run_template = run_folder / CHAT_TEMPLATE.name
    template = run_template if run_template.is_file() else CHAT_TEMPLATE
    tokenizer, special = write_tokenizer(path, folder, config.max_position_embeddings, template)
    if (pieces := 1 + max(tokenizer.get_vocab().values())) > config.vocab_size:
        raise ValueError(
            f"{path} has {pieces} pieces, more than vocab_size = {config.vocab_size}; check --tokenizer"
        )
    if path.suffix != ".json":
        shutil.copyfile(path, folder / "tokenizer.model")
    return special, list_token_ids(tokenizer, special)


def locate_checkpoint(checkpoint: Path) -> Path:
    """Return RUN/checkpoint/step-N as an absolute path; links are followed only outside of a run."""
    path = Path(os.path.abspath(checkpoint))
    in_run = path.name.startswith("step-") and (path.parent.parent / "model.json").is_file()
    return path if in_run else checkpoint.resolve()


def locate_tokenizer(run_folder: Path) -> Path:
    path = run_folder / "tokenizer.json"
    return path if path.is_file() else run_folder / "tokenizer.model"


def checkpoint_step(checkpoint: Path) -> int | None:
    match = re.fullmatch(r"step-(\d+)", locate_checkpoint(checkpoint).name)
    return int(match[1]) if match else None


@contextlib.contextmanager
def stage_folder(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that replaces `out` when the block succeeds and is deleted when it raises."""
    part, old = out.with_name(out.name + ".part"), out.with_name(out.name + ".old")
    with hold_folder(part, out):
        try:
            if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not overwrite)):
                raise ValueError(
                    f"{out} exists and is not an empty folder; choose another --out, or pass --overwrite"
                )
            yield part
            if out.exists():
                # comes back if the rename below fails
                out.rename(old)
            part.rename(out)
        except (SafetensorError, CheckpointException) as error:
            # of a full disk; DCP's text is a traceback, whose last line says what it was
            reason = str(error).strip().splitlines()[-1]
            raise OSError(f"{out}: {reason}; nothing was written") from error
        finally:
            if old.exists() and not out.exists():
                old.rename(out)
            shutil.rmtree(part, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def hold_folder(folder: Path, out: Path) -> Iterator[None]:
    """Lock and empty a folder while the block runs; raise ValueError where another process writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        busy = f"another process writes {out}; wait for it, or choose another --out"
        try:
            # the system drops the lock of a process that was killed
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(busy) from None
        # the other process may have renamed or removed the folder since it was opened
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise ValueError(busy)
        for path in folder.iterdir():  # of one that was killed
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield
    finally:
        os.close(descriptor)


def load_weights(checkpoint: Path, config: LaneformerConfig) -> dict[str, Tensor]:
    """Read tensors in the stored dtype; raise ValueError for missing or misshapen ones."""
    if not (checkpoint / ".metadata").is_file():
        raise ValueError(
            f"{checkpoint} is no complete torch DCP checkpoint (no .metadata); choose another step"
        )
    reader = dcp.FileSystemReader(checkpoint)
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    expected = config.tensor_shapes()
    # the model's own tensors alone
    shapes = {
        name: stored[name].size for name in stored if name in expected or name.startswith("layers.")
    }
    check_shapes(str(checkpoint), shapes, expected, "; pass its own --config")
    weights = {
        name: torch.empty(shape, dtype=stored[name].properties.dtype)
        for name, shape in expected.items()
    }
    dcp.load(weights, storage_reader=reader, no_dist=True)
    return weights


def round_weight(name: str, weight: Tensor, dtype: DType) -> Tensor:
    if not torch.isfinite(weight).all():
        raise ValueError(f"{name} holds NaN or infinity; export an earlier checkpoint")
    out = weight.to(getattr(torch, dtype))
    if not torch.isfinite(out).all():
        raise ValueError(
            f"{name} holds {float(weight.abs().max()):.4g}, too large for {dtype}; use bfloat16"
        )
    return out


def write_weights(
    folder: Path, weights: dict[str, Tensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    weights_by_hf_name = {hf_name(name): weight for name, weight in weights.items()}
    split = split_torch_state_dict_into_shards(weights_by_hf_name, max_shard_size=max_shard_bytes)
    for file, names in split.filename_to_tensors.items():
        save_file(
            {name: weights_by_hf_name[name].contiguous() for name in names},
            folder / file,
            metadata={"format": "pt"},
        )
        (folder / file).chmod(0o644)  # safetensors creates files with mode 600
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_configs(
    folder: Path, config: LaneformerConfig, dtype: DType, token_ids: dict[str, Any]
) -> None:
    """Write config.json, the code that it names, and generation_config.json."""
    head = {"architectures": ["LaneformerForCausalLM"], "auto_map": AUTO_MAP}
    head |= {"model_type": "laneformer", "dtype": dtype}
    (folder / "config.json").write_text(
        json.dumps({**head, **token_ids, **config.to_dict()}, indent=2) + "\n"
    )
    (folder / "generation_config.json").write_text(json.dumps(token_ids, indent=2) + "\n")
    write_code(folder)


def write_code(folder: Path) -> None:
    package = Path(__file__).parent.parent
    for source in CODE:
        # `from ..model` becomes `from .model`
        text = re.sub(
            r"^from \.\.(\w)", r"from .\1", (package / source).read_text(), flags=re.MULTILINE
        )
        (folder / Path(source).name).write_text(text)


def write_card(
    folder: Path,
    config: LaneformerConfig,
    dtype: str,
    progress: Progress,
    special: dict[str, str],
) -> None:
    template = (folder / CHAT_TEMPLATE.name).read_text()
    chat = CHAT_WITH_TOOLS if "tools" in template else CHAT
    c = config
    full = [str(i) for i in range(c.num_hidden_layers) if c.window(i) is None]
    table = {
        "Layers, hidden size, intermediate size": f"{c.num_hidden_layers}, {c.hidden_size}, {c.intermediate_size}",
        "Attention heads, KV heads": f"{c.num_attention_heads}, {c.num_key_value_heads}",
        "Lanes, broadcast delay": f"{c.num_lanes}, {c.broadcast_delay} layers",
        "Context": f"{c.max_position_embeddings} tokens",
        "Sliding window": f"{c.sliding_window} tokens; full attention in layers: {', '.join(full) or 'none'}",
        "Vocabulary": f"{c.vocab_size}, head `{c.lm_head_type}`",
    }
    if progress.step is not None:
        table["Checkpoint"] = f"step {progress.step:,}" + (
            f" of {progress.phase}" if progress.phase else ""
        )
    if progress.tokens_total is not None:
        table["Training tokens"] = f"{progress.tokens_total:,}"
    if progress.loss is not None:
        table["Training loss at that step"] = f"{progress.loss:.4f}"
    total = c.parameter_count()["total"]
    size = f"{total / 1e9:.1f}B" if total >= 1e9 else f"{total / 1e6:.1f}M"
    rows = "\n".join(f"| {key} | {value} |" for key, value in table.items())
    text = Path(__file__).with_name("model_card.md").read_text()
    special = {"pad_token": "not set", **special}
    card = text.format(
        size=size, total=total, rows=rows, dtype=dtype, chat=chat, **special, **c.to_dict()
    )
    (folder / "README.md").write_text(card)


@torch.no_grad()
def verify(folder: Path, config: LaneformerConfig, weights: dict[str, Tensor]) -> float:
    """Return the largest absolute difference of the exported and the plain model's logits, in float32."""
    from transformers import AutoModelForCausalLM

    # past a short window, so that its mask takes effect
    length = min(config.max_position_embeddings, config.sliding_window + 16, 256)
    ids = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.device("meta"):
        plain = Laneformer(config)
    weights_fp32 = {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}
    plain.load_state_dict(weights_fp32, assign=True)
    expected = plain(ids)
    del plain  # two float32 copies of a 2B model at once would not fit on small machines
    exported = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )
    difference = float((exported.eval()(ids).logits - expected).abs().max())
    # the same operations on the same numbers: only the choice of an attention kernel can differ,
    # about 1e-6 of the largest logit. A misplaced weight changes logits by about their own size
    if not difference <= 1e-4 * float(expected.abs().max()):
        raise ValueError(
            f"exported logits differ from the training model's by {difference:.3g}; nothing was written"
        )
    loaded = exported.state_dict()
    for name in (name for name in weights if name.startswith(MTP)):  # which the logits do not show
        if not torch.equal(loaded[hf_name(name)], weights_fp32[name]):
            raise ValueError(
                f"the exported {name} is not the training model's; nothing was written"
            )
    return difference


if __name__ == "__main__":
    print(json.dumps(tyro.cli(export)))
