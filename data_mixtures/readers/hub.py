"""Parquet files of a dataset on the hub, or in a mirror of it.

A mirror is a folder or any URL that fsspec supports, laid out as <repo>/<config folder>/*.parquet. The
hub is one more fsspec file system, with commits and hashes.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import fsspec.implementations.local
from huggingface_hub import HfApi, HfFileSystem, get_token, hf_hub_download
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import disable_progress_bars


@dataclass(frozen=True, order=True)
class File:
    """A Parquet file; sha256 (hex) if known without reading it."""

    path: str
    bytes: int
    sha256: str | None = None


class Mirror:
    """A copy of repositories, without commits: revisions are not checked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.system, self.root = fsspec.url_to_fs(url)
        # whether a failed transfer is worth another attempt
        self.remote = not is_local(self.system)

    def place(self, repo: str, revision: str, path: str = "") -> str:
        return f"{self.root}/{repo}/{path}"

    def revision(self, repo: str, revision: str) -> str:
        """Return the full revision of a repository; ValueError if it cannot be read."""
        if not self.system.isdir(f"{self.root}/{repo}"):
            raise ValueError(f"the mirror {self.url} has no folder {repo}")
        return revision

    def files(self, repo: str, revision: str, folder: str) -> list[File]:
        """Return all Parquet files below exactly this folder, by path."""
        start = self.place(repo, revision)
        files = []
        for name, info in self.system.find(start + folder, detail=True).items():
            if name.endswith(".parquet"):
                sha256 = info["lfs"]["sha256"] if info.get("lfs") else None
                files.append(File(name.removeprefix(start), info["size"], sha256))
        return sorted(files)

    def folders(self, repo: str, revision: str) -> list[str]:
        entries = self.system.ls(self.place(repo, revision), detail=True)
        return sorted(Path(entry["name"]).name for entry in entries if entry["type"] == "directory")

    def open(self, repo: str, revision: str, path: str) -> BinaryIO:
        return self.system.open(self.place(repo, revision, path), "rb", block_size=1 << 20)

    def fetch(self, repo: str, revision: str, path: str, target: Path) -> None:
        """Copy a file to `target`, in an otherwise empty folder."""
        copy_or_link(self.system, self.place(repo, revision, path), target)


class Hub(Mirror):
    """The dataset hub (HF_ENDPOINT, HF_TOKEN)."""

    def __init__(self) -> None:
        self.api = HfApi()
        self.system = HfFileSystem(endpoint=self.api.endpoint)
        self.remote = True

    def place(self, repo: str, revision: str, path: str = "") -> str:
        return f"datasets/{repo}@{revision}/{path}"

    def revision(self, repo: str, revision: str) -> str:
        where = f"{repo} @ {revision}"
        page = f"{self.api.endpoint}/datasets/{repo}"
        token = (
            "the token in HF_TOKEN is not of an account that did"
            if get_token()
            else "HF_TOKEN is not set"
        )
        try:
            self.api.auth_check(repo, repo_type="dataset")
            commit = str(self.api.dataset_info(repo, revision=revision).sha)
        except hub_errors.GatedRepoError as error:
            raise ValueError(
                f"{where}: gated: accept its agreement at {page} and set HF_TOKEN ({token})"
            ) from error
        except hub_errors.RevisionNotFoundError as error:
            raise ValueError(f"{where}: no such revision; see {page}/commits/main") from error
        except hub_errors.RepositoryNotFoundError as error:
            raise ValueError(f"{where}: not found at {page}, or private and {token}") from error
        except Exception as error:  # no network, a proxy, a server error
            raise ValueError(
                f"{where}: not reachable at {page}: {type(error).__name__}: {error} "
                "(without a network, python -m tools.plan JOB.toml estimates what will be read)"
            ) from error
        return commit

    def fetch(self, repo: str, revision: str, path: str, target: Path) -> None:
        # `run` shows a bar of its own
        disable_progress_bars()
        folder = target.with_name("download")
        try:
            download = hf_hub_download(
                repo, path, repo_type="dataset", revision=revision, local_dir=folder
            )
            os.replace(download, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def copy_or_link(system: Any, source: str, target: Path) -> None:
    """Copy a file, or link it, which needs no space."""
    if is_local(system) and os.path.exists(source):
        # linking fails on another disk, or on a file system without links: copy then
        with suppress(OSError):
            # Linux would link a symbolic link itself
            return os.link(os.path.realpath(source), target)
    system.get_file(source, str(target))


def is_local(system: Any) -> bool:
    return isinstance(system, fsspec.implementations.local.LocalFileSystem)


def connect(mirror: str | None) -> Mirror:
    """Return what repositories are read from: a mirror's folder or URL, else the hub."""
    return Mirror(mirror) if mirror else Hub()
