"""Text files as windows of tokens: some held out, and an endless order of others to train on."""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

PLACES = {"stdlib": sysconfig.get_paths()["stdlib"], "packages": str(Path(torch.__file__).parents[1])}


class Text:
    """All tokens of the files that fit some glob patterns, in the order of their names, (n,) int64.

    {stdlib} is Python's folder, {packages} that of installed packages, of whose METADATA
    only the description counts.
    """

    def __init__(self, patterns: Sequence[str], tokenizer: Tokenizer):
        paths = {Path(name) for pattern in patterns for name in glob.glob(pattern.format(**PLACES))}
        self.files = sorted(paths, key=lambda path: path.parts[-2:])
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in self.files]
        texts = [
            t.partition("\n\n")[2] if p.name == "METADATA" else t
            for p, t in zip(self.files, texts, strict=True)
        ]
        ids = [encoded.ids for encoded in tokenizer.encode_batch(texts, add_special_tokens=False)]
        self.tokens = torch.tensor([token for part in ids for token in part])
        self.sha256 = hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()

    def spread(self, windows: int, seq_len: int) -> torch.Tensor:
        """Windows (n, S + 1) at equal distances; ValueError where they would overlap."""
        apart = len(self.tokens) // windows
        if apart <= seq_len:
            raise ValueError(
                f"{len(self.tokens):,} tokens do not hold {windows} windows of {seq_len + 1}: more files"
            )
        return self.tokens[: windows * apart].view(windows, apart)[:, : seq_len + 1]

    def drawn(self, seed: int, step: int, windows: int, seq_len: int) -> torch.Tensor:
        """Windows (n, S + 1) at random places: a function of seed and step, so that a run can go on anywhere."""
        places = np.random.default_rng([seed, step]).integers(len(self.tokens) - seq_len, size=windows)
        return torch.stack([self.tokens[i : i + seq_len + 1] for i in places])
