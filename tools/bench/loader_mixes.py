"""litdata and Grain for `tools.bench loader`: loaders that draw windows of several sources by weight."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.bench.loader_process import BATCH, EPOCH, Batches, Installed, skip


class LitData(Installed):
    """litdata's CombinedStreamingDataset of one shuffled TokensLoader a source, with weights."""

    name = "litdata"

    def __init__(self, data: Path):
        super().__init__(data)
        os.environ["LITDATA_CACHE_DIR"] = str(data / "litdata-cache")
        logging.disable(logging.WARNING)
        from litdata.streaming import Cache, TokensLoader

        for source in self.names:
            folder = data / "litdata" / source
            if (folder / "index.json").is_file():
                continue
            cache = Cache(str(folder), chunk_bytes="64MB", item_loader=TokensLoader(self.seq_len + 1))
            for number, window in enumerate(self.tokens_of(source)):
                cache[number] = torch.from_numpy(window.copy())
            cache.done()
            cache.merge()

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, TokensLoader

        parts = [
            StreamingDataset(
                str(self.data / "litdata" / name), item_loader=TokensLoader(self.seq_len + 1), shuffle=True,
                seed=1, transform=functools.partial(with_source, index),
            )
            for index, name in enumerate(self.names)
        ]  # fmt: skip
        mixed = CombinedStreamingDataset(parts, seed=1, weights=self.shares, iterate_over_all=False)
        loader = StreamingDataLoader(mixed, batch_size=BATCH, num_workers=workers)
        if state:
            loader.load_state_dict(state)
        while True:
            self.current = loader
            for tokens, sources in loader:
                yield tokens.long(), sources.numpy()

    def state_at(self, sequence: int) -> Any:
        if sequence > EPOCH:
            raise LookupError(f"only by reading beyond {EPOCH} sequences")
        skip(self.batches(), sequence // BATCH)
        return self.current.state_dict()


def with_source(index: int, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tokens, index


class Rows:
    """A source of windows as Grain reads one: by index."""

    def __init__(self, path: Path, index: int):
        self.path, self.index, self.rows = str(path), index, np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"tokens": self.rows[at].astype(np.int64), "source": self.index}


class Grain(Installed):
    """Grain's MapDataset.mix of shuffled sources, which TorchTitan's newer loader is built of."""

    name = "grain"

    def __init__(self, data: Path):
        super().__init__(data)
        (data / "grain").mkdir(exist_ok=True)
        for source in self.names:
            np.save(data / "grain" / f"{source}.npy", self.tokens_of(source))

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        import grain

        sources = [
            grain.MapDataset.source(Rows(self.data / "grain" / f"{name}.npy", index))
            .seed(index)
            .shuffle()
            .repeat()
            for index, name in enumerate(self.names)
        ]
        mixed = grain.MapDataset.mix(sources, self.shares).batch(BATCH)
        threads = grain.ReadOptions(num_threads=2 * workers, prefetch_buffer_size=16 * workers)
        batches = iter(mixed.to_iter_dataset(threads))
        if state:
            batches.set_state({**batches.get_state(), "next_index": state // BATCH})
        for batch in batches:
            yield torch.from_numpy(batch["tokens"]), batch["source"]
