"""Pack conversations for the tests of training, and build a model that is small enough for them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laneformer import Laneformer, LaneformerConfig
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer
from tests.records.lines import write_lines
from tests.train import runs
from train.data import split_inputs_and_labels
from train.sft import identity
from train.sft.__main__ import Arguments, run

SEQ_LEN = 512
ARCHITECTURE = {**runs.ARCHITECTURE, "max_position_embeddings": SEQ_LEN, "sliding_window": 64}
CONFIG = LaneformerConfig.from_flavor("tiny", swa_layers=(0, 1, 2), **ARCHITECTURE)
FLAGS = (
    "--architecture.max_position_embeddings",
    str(SEQ_LEN),
    "--architecture.sliding_window",
    "64",
    "--training.seq_len",
    str(SEQ_LEN),
)


def conversations(count: int) -> list[list[dict[str, str]]]:
    # short ones: what they leave of a window is padding
    return identity.conversations(tomllib.loads(identity.EXAMPLE.read_text()), count, seed=1)


def prepare(folder: Path, tokenizer: Path, count: int, seq_len: int = SEQ_LEN) -> Path:
    """Return the lock of a mixture of `count` conversations, less those too long for a window."""
    rows = write_lines(
        folder / "identity.jsonl", ({"messages": turns} for turns in conversations(count))
    )
    arguments = Arguments(
        (str(rows),),
        tokenizer,
        folder / "data",
        seq_len=seq_len,
        holdout=0.1,
        max_dropped=1,
        workers=1,
        seed=2,
    )
    return run(arguments)


def batch(tokens: np.ndarray, flags: np.ndarray) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return split_inputs_and_labels(
        *(torch.from_numpy(array.astype(np.int64)) for array in (tokens, flags))
    )


def plain_model(dtype: torch.dtype = torch.float64) -> Laneformer:
    model = Laneformer(CONFIG)
    model.init_weights(seed=1)
    return model.to(dtype)


def titan_model(**args: Any) -> TitanLaneformer:
    # with the same weights
    model = TitanLaneformer(
        LaneformerArgs(config=CONFIG, attention="sdpa", mask_documents=True, bos_id=1, **args)
    )
    model.load_state_dict(plain_model().state_dict())
    return model.to(torch.float64)
