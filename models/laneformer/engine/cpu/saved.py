"""Save cached prefixes to files in `cache_dir`, and load them after a restart (saved_folder.py)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...config import EMBEDDING, HEAD, MATRICES, LaneformerConfig
from ...llama.variant import ROUTER
from ...tensors import Tensor
from ..decoder import Request
from . import _core
from .saved_file import FORMAT_VERSION, Damaged, Layout, Prefix, write
from .saved_folder import SavedFolder, TooLarge

DEFAULT_BYTES = 10 * 10**9
IDLE_S = 10.0  # without requests, before prefixes that have grown are saved
WORTH_LOADING = 32  # positions: computing fewer is as fast as loading them
log = logging.getLogger(__name__)


class Interrupted(Exception):
    """A request arrived while a prefix was being saved."""


class SavedPrefixes:
    """The saved prefixes of one decoder; ValueError where the directory cannot be used.

    limit_bytes: of all files in the directory. hits, hit_tokens: prefixes loaded, and ids not read again.
    """

    # a prefix is saved when it has grown and nothing happened for IDLE_S, when it leaves the pool
    # of caches, and at `close`; it is loaded before a request that shares more with a file than
    # with the pool

    def __init__(self, decoder: _core.Decoder, directory: Path, limit_bytes: int, key: str):
        self.decoder, self.layout = decoder, Layout(*decoder.kv_layout)
        self.idle_s, self.hits, self.hit_tokens = IDLE_S, 0, 0
        self._loading, self._saving = threading.Lock(), threading.Lock()
        self._wake_event, self._closed, self._has_warned = threading.Event(), False, False
        try:
            self.folder = SavedFolder(directory, limit_bytes, key, self.layout, decoder.start_in)
        except OSError as error:
            raise ValueError(
                f"cache_dir = {str(directory)!r} cannot be used: {error}; choose a directory of your own"
            ) from None
        decoder.set_saves(True)
        self._thread = threading.Thread(target=self._run, name="laneformer-saves", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[str, int]:
        """The number, bytes and hits of this model's files, and the limit."""
        return {
            "files": len(self.folder),
            "bytes": self.folder.bytes,
            "limit_bytes": self.folder.limit_bytes,
            "hits": self.hits,
            "hit_tokens": self.hit_tokens,
        }

    def load(self, prompt: Sequence[int], most: int) -> None:
        """Load into the pool the file with which the prompt starts latest, at `most` or before."""
        if not len(self.folder) or most < WORTH_LOADING:
            return
        prompt, ids = list(prompt), np.array(prompt[:most], np.int32)
        with self._loading:
            while (candidate := self.folder.best(ids)) is not None:
                file, start = candidate
                in_pool = self.decoder.reusable(prompt, most)
                if start < in_pool + WORTH_LOADING:
                    return
                try:
                    pages = self.decoder.new_pages()
                    file.fill(start, pages.segment)
                except (Damaged, OSError) as error:
                    self.folder.reject(file.path, error)
                    continue
                except MemoryError:
                    return
                prefix = file.prefix
                if self.decoder.adopt(
                    pages, prefix.ids[:start].tolist(), prefix.starts, prefix.dropped
                ):
                    self.hits, self.hit_tokens = self.hits + 1, self.hit_tokens + start - in_pool
                    with contextlib.suppress(OSError):
                        os.utime(file.path)
                return

    def wake(self) -> None:
        self._wake_event.set()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake_event.set()
        self._thread.join()
        while self._save(_core.Save.all):
            pass
        self.decoder.set_saves(False)

    def _run(self) -> None:
        # saving must not slow requests: the lowest priority, of this thread alone
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        may_have_grown = False
        while not self._closed:
            is_woken = self._wake_event.wait(self.idle_s if may_have_grown else None)
            self._wake_event.clear()
            if self.decoder.leaves:
                self._save(_core.Save.leaving)
            elif not is_woken:
                while (
                    not self._closed and not self.decoder.running and self._save(_core.Save.grown)
                ):
                    pass
            may_have_grown = is_woken

    def _save(self, kind: _core.Save) -> bool:
        """Save one prefix; return False where there was none, or saving failed."""
        with self._saving:
            job = self.decoder.begin_saving(kind)
            if job is None:
                return False
            cache, ids, starts, dropped = job
            part, is_saved, prefix = None, False, Prefix(ids, starts, dropped)
            read = functools.partial(self.decoder.segment, cache)
            # no fsync: what a crash leaves is found like any other damage
            try:
                part = self.folder.part(prefix)
                write(
                    part,
                    self.folder.key,
                    prefix,
                    self.layout,
                    read,
                    functools.partial(self._give_way, kind),
                )
                is_saved = True
            except Interrupted:
                pass
            except OSError as error:
                is_saved = isinstance(error, TooLarge)  # not tried again before it grows
                self._warn_once(f"prefixes cannot be saved in {self.folder.directory}: {error}")
            finally:
                is_complete = self.decoder.finish_saving(is_saved)
                if part is not None:
                    self._end(part, prefix if is_complete else None)
            return is_saved

    def _end(self, part: Path, prefix: Prefix | None) -> None:
        try:
            if prefix is not None:
                self.folder.publish(part, prefix)
                self._has_warned = False
            part.unlink(missing_ok=True)
        except OSError as error:
            self._warn_once(f"{part} cannot be kept: {error}")

    def _give_way(self, kind: _core.Save, took_s: float) -> None:
        # between two pieces
        if kind == _core.Save.grown and self.decoder.running and not self._closed:
            raise Interrupted
        if kind == _core.Save.leaving and self.decoder.running and not self._closed:
            time.sleep(took_s)

    def _warn_once(self, why: object) -> None:
        # once, until files can be written again
        if not self._has_warned:
            log.warning("%s; they are computed again after a restart", why)
        self._has_warned = True


def max_reusable(request: Request) -> int:
    """Return the most positions that a request may reuse: Sequence::max_reusable (schedule/sequence.h)."""
    if not request.reuse_prefix or request.keep_logits:
        return 0
    return (request.score_from or len(request.prompt)) - 1


def model_key(
    decoder: _core.Decoder,
    arithmetic: Sequence[str],
    config: LaneformerConfig,
    tensors: Mapping[str, Tensor],
) -> str:
    """Return a hash of everything that decides the bits of keys and values."""
    packed_suffixes = (EMBEDDING, HEAD, *(f"{matrix}.weight" for matrix in (*MATRICES, ROUTER)))
    others: Sequence[str] = [
        name for name in sorted(config.tensor_shapes()) if not name.endswith(packed_suffixes)
    ]
    # other models, and other builds of the engine, may use the same directory
    key_inputs: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "config": config.to_dict(),
        "arithmetic": [decoder.isa, *arithmetic],
        "parts": [_core.content_hash(decoder.part(i)) for i in range(decoder.parts)],
        "others": [
            _core.content_hash(np.ascontiguousarray(tensors[name].values)) for name in others
        ],
        "engine": _core.content_hash(np.fromfile(_core.__file__, np.uint8)),
    }
    return hashlib.sha256(json.dumps(key_inputs, sort_keys=True).encode()).hexdigest()
