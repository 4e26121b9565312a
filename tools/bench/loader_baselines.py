"""The loaders that `tools.bench loader` compares, ours and the baselines, and the process of one of them.

The baselines are unmodified; each reads tokenized data in the format that its documentation recommends, in its
faster mode. Some have to be installed, each into a folder of its own beside the environment.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from data_mixtures.mixture import Mixture
from tools.bench.harness import Result, serve
from tools.bench.loader_mixes import Grain, LitData
from tools.bench.loader_process import BATCH, EPOCH, FOLDER, Batches, Installed, Loader, skip
from train.job_config import patch_torch_for_cpu

PACKAGES = {
    "mosaicml-streaming": "mosaicml-streaming zstd python-snappy cramjam Brotli catalogue",
    "olmo-core": "ai2-olmo-core bettermap cached-path dataclass-extensions",
    "megatron-core": "megatron-core",
    "litdata": "litdata lightning-utilities tifffile obstore",
    "grain": "grain absl-py array-record etils cloudpickle more-itertools protobuf portpicker",
}
VOCAB_SIZE, EOS = 32_000, 2
LARGEST_ORDER = 2_000_000  # samples; olmo-core and megatron-core build files of the whole order before step 1
DOCUMENT_TOKENS = 1024  # Megatron shuffles documents and cuts them into windows afterwards


def install(name: str) -> str | None:
    """The line that installs a loader; None where it is installed, or comes with the environment."""
    if name not in PACKAGES or (FOLDER / name).is_dir():
        return None
    return f"{sys.executable} -m pip install --no-deps --target {FOLDER / name} {PACKAGES[name]}"


def parquet(data: Path, name: str, **options: Any) -> Any:
    """The rows of a Parquet file of the benchmark's data, by Hugging Face's datasets."""
    import datasets

    datasets.disable_progress_bars()
    path, cache = str(data / f"{name}.parquet"), str(data / "cache")
    return datasets.load_dataset("parquet", data_files=path, split="train", cache_dir=cache, **options)


class Sequences(Loader):
    """Ours without the threads around it."""

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        mixture = Mixture.open(self.data / "phase1.lock.json")
        while True:
            tokens, sources = mixture.sequences(state, BATCH)
            yield torch.from_numpy(tokens), sources
            state += BATCH


class OurLoader(Loader):
    """Ours as the trainer uses it: two reader threads, on one core too."""

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        from records.skips import SkipList
        from train.data import MixtureLoader

        loader = MixtureLoader(self.data / "phase1.lock.json", 0, 1, BATCH, 2, SkipList())
        saved = json.loads(loader.state_dict()["mixture"])
        loader.load_state_dict({"mixture": json.dumps({**saved, "sequences": state})})
        for inputs, _ in loader:
            yield inputs["input"], inputs["source"].numpy()


class TorchTitan(Loader):
    """Its own data set and loader on rows of token ids, mixed beforehand, as it reads a single data set."""

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.hf_datasets import DatasetConfig
        from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

        load = functools.partial(parquet, self.data)
        DATASETS["rows"] = DatasetConfig("mixed", load, lambda sample: sample["tokens"])
        no_text = types.SimpleNamespace(encode=lambda tokens, **_: tokens)  # tokenizing would cost it more
        dataset = HuggingFaceTextDataset("rows", None, no_text, self.seq_len, infinite=True)
        dataset.load_state_dict({"token_buffer": [], "sample_idx": state})
        for inputs, _ in ParallelAwareDataloader(dataset, 0, 1, batch_size=BATCH, num_workers=workers):
            yield inputs["input"], None

    def state_at(self, sequence: int) -> Any:
        if sequence >= (rows := pq.read_metadata(self.data / "mixed.parquet").num_rows):
            raise LookupError(f"only by reading beyond its {rows} rows")
        return sequence


class Interleave(Loader):
    """datasets.interleave_datasets over memory-mapped Arrow files, or over streamed Parquet files."""

    def __init__(self, data: Path, streaming: bool = False):
        super().__init__(data)
        self.streaming = streaming

    def mixed(self, state: Any = 0) -> Any:
        import datasets

        parts = [parquet(self.data, name, streaming=self.streaming) for name in self.names]
        mixed = datasets.interleave_datasets(parts, self.shares, seed=1, stopping_strategy="all_exhausted")
        mixed = mixed.with_format("numpy")
        if state and self.streaming:
            mixed.load_state_dict(state)
        return mixed.skip(state) if state and not self.streaming else mixed

    def state_at(self, sequence: int) -> Any:
        mixed = self.mixed()
        if self.streaming and sequence > EPOCH:
            raise LookupError(f"only by reading beyond {EPOCH} sequences")
        if not self.streaming and sequence >= (length := len(mixed)):
            raise LookupError(f"impossible beyond its {length} rows")
        if not self.streaming:
            return sequence
        skip(mixed.iter(BATCH), sequence // BATCH)
        return mixed.state_dict()

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        mixed = self.mixed(state)
        if workers:
            yield from torch.utils.data.DataLoader(mixed, BATCH, num_workers=workers, collate_fn=collate)
        while True:
            for rows in mixed.iter(BATCH, drop_last_batch=True):
                yield torch.from_numpy(rows["tokens"].astype(np.int64)), rows["source"]
            mixed = self.mixed()


def collate(rows: list[Result]) -> tuple[torch.Tensor, np.ndarray]:
    tokens = np.stack([row["tokens"] for row in rows]).astype(np.int64)
    return torch.from_numpy(tokens), np.array([int(row["source"]) for row in rows])


class Mosaic(Installed):
    """mosaicml-streaming's StreamingDataset with a proportion per stream and its default shuffle."""

    name = "mosaicml-streaming"

    def __init__(self, data: Path):
        super().__init__(data)
        package = types.ModuleType("streaming")  # its own one imports its image data sets, hence torchvision
        package.__path__ = [str(FOLDER / self.name / "streaming")]
        sys.modules["streaming"] = package
        torch._utils._get_available_device_type = lambda: "cpu"
        if (data / "mds").is_dir():
            return
        from streaming.base import MDSWriter

        columns = {"tokens": f"ndarray:uint16:{self.seq_len + 1}", "source": "uint16"}
        for index, name in enumerate(self.names):
            with MDSWriter(out=str(data / "mds" / name), columns=columns) as writer:
                for window in self.tokens_of(name):
                    writer.write({"tokens": window, "source": np.uint16(index)})

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        from streaming.base import Stream, StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        streams = [
            Stream(local=str(self.data / "mds" / name), proportion=share)
            for name, share in zip(self.names, self.shares, strict=True)
        ]
        dataset = StreamingDataset(streams=streams, batch_size=BATCH, epoch_size=EPOCH, num_canonical_nodes=1,
                                   shuffle=True, shuffle_seed=1)  # fmt: skip
        if state:
            epoch, within = divmod(state, EPOCH)
            dataset.load_state_dict({**dataset.state_dict(within, True), "epoch": epoch})
        for _ in range(1000):
            yield from StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=collate)


class Ordered(Installed):
    """One whose order of the whole run is in files; they are there when a job resumes."""

    def state_at(self, sequence: int) -> Any:
        if sequence > LARGEST_ORDER:
            raise LookupError(
                f"not tried beyond {LARGEST_ORDER:,}: an order of that many samples would be built first"
            )
        next(self.batches(sequence))
        return sequence


class OlmoCore(Ordered):
    """OLMo-core's NumpyFSLDataLoader over a source mixture: the order of the trainer of OLMo 2 and 3."""

    name = "olmo-core"

    def __init__(self, data: Path):
        super().__init__(data)
        (data / "olmo").mkdir(exist_ok=True)
        for name in self.names:
            if not (path := data / "olmo" / f"{name}.npy").is_file():  # raw tokens, whatever the suffix says
                np.append(self.tokens_of(name)[:, :-1], np.uint16(EOS)).tofile(path)  # it looks for an end

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDatasetConfig, TokenizerConfig
        from olmo_core.data.source_mixture import (
            SourceMixtureConfig,
            SourceMixtureDatasetConfig,
            SourceMixtureList,
        )

        sources = [
            SourceMixtureConfig(name, share, [str(self.data / f"olmo/{name}.npy")], max_repetition_ratio=1e4)
            for name, share in zip(self.names, self.shares, strict=True)
        ]
        size, batch = max(EPOCH, state + 100 * BATCH), BATCH * self.seq_len
        mixture = SourceMixtureDatasetConfig(
            SourceMixtureList(sources), size * self.seq_len, batch, render_tables=False, quiet=True
        )
        tokenizer = TokenizerConfig(vocab_size=VOCAB_SIZE, eos_token_id=EOS, pad_token_id=0)
        folder = str(self.data / f"olmo/work-{size}")
        dataset = NumpyFSLDatasetConfig.from_src_mix(
            mixture, tokenizer=tokenizer, sequence_length=self.seq_len, work_dir=folder
        ).build()
        dataset.prepare()
        loader = NumpyFSLDataLoader(
            dataset, collator=DataCollator(pad_token_id=0), global_batch_size=batch, work_dir=folder, seed=1,
            num_workers=workers,
        )  # fmt: skip
        ends = np.array([end for _, end in dataset.offsets])
        source_of = np.array([self.names.index(Path(path).stem) for path in dataset.paths])
        loader.reshuffle(epoch=1)
        loader.batches_processed = state // BATCH
        while True:
            for each in loader:
                index = each["index"].numpy()
                yield each["input_ids"].long(), source_of[np.searchsorted(ends, index, side="right")]
            loader.reset()
            loader.reshuffle()


class Tokenizer:
    """What Megatron's data set asks of one."""

    vocab_size, eod, pad = VOCAB_SIZE, EOS, 0
    unique_identifiers: dict[str, str] = {"class": "Tokenizer"}  # noqa: RUF012


class Megatron(Ordered):
    """megatron-core's blended GPTDataset; its sampler, of Megatron-LM, reads the samples in a row."""

    name = "megatron-core"

    def __init__(self, data: Path):
        super().__init__(data)
        logging.disable(logging.WARNING)
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
            )
        (data / "megatron").mkdir(exist_ok=True)
        for name in self.names:
            path = data / "megatron" / name
            if not path.with_suffix(".idx").is_file():
                builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
                tokens = self.tokens_of(name)[:, :-1].ravel()
                for first in range(0, len(tokens), DOCUMENT_TOKENS):
                    document = tokens[first : first + DOCUMENT_TOKENS]
                    builder.add_document(document, [len(document)])
                builder.finalize(f"{path}.idx")

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

        size = max(EPOCH, state + 100 * BATCH)
        config = GPTDatasetConfig(
            random_seed=1, sequence_length=self.seq_len, split="1,0,0", tokenizer=Tokenizer(),
            blend=([str(self.data / "megatron" / name) for name in self.names], self.shares),
            path_to_cache=str(self.data / "megatron/cache"), reset_position_ids=False, reset_attention_mask=False,
            eod_mask_loss=False, create_attention_mask=False,
        )  # fmt: skip
        dataset, *_ = BlendedMegatronDatasetBuilder(GPTDataset, [size, 0, 0], lambda: True, config).build()
        while True:
            order = torch.arange(state, size // BATCH * BATCH).view(-1, BATCH).tolist()
            for each in torch.utils.data.DataLoader(dataset, batch_sampler=order, num_workers=workers):
                yield each["tokens"], each["dataset_id"].numpy()
            state = 0


LOADERS: dict[str, Callable[[Path], Loader]] = {
    "Mixture.sequences": Sequences,
    "MixtureLoader": OurLoader,
    "torchtitan": TorchTitan,
    "interleave_datasets": Interleave,
    "interleave_datasets, streaming": functools.partial(Interleave, streaming=True),
    **{kind.name: kind for kind in (Mosaic, OlmoCore, Megatron, LitData, Grain)},
}


def main(name: str, data: Path) -> None:
    """Measure one loader until stdin ends: a command is a method of Loader that gives a Result."""
    torch.set_num_threads(1)
    patch_torch_for_cpu()
    loader = functools.cache(lambda: LOADERS[name](data))

    def answer(do: str, argument: Any) -> Result:
        os.sched_setaffinity(0, {0})
        return getattr(loader(), do)(argument)

    serve(answer)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
