"""Parquet files of a dataset on the hub, or in a mirror of it.

A mirror is any URL that fsspec supports, or a folder, laid out as <repo>/<config folder>/*.parquet. Both have
the same methods: check the access to a repository, list the files of a folder, open a file to read parts of
it, copy a file.
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
from huggingface_hub.hf_api import RepoFile, RepoFolder
from huggingface_hub.utils import disable_progress_bars

NOT_REACHABLE = "not reachable"


@dataclass(frozen=True, order=True)
class File:
    """A Parquet file of a repository; sha256 (hex) where the origin knows it without reading the file."""

    path: str
    bytes: int
    sha256: str | None = None


class Hub:
    """The dataset hub (HF_ENDPOINT, HF_TOKEN)."""

    remote = True  # a failed transfer can be tried again

    def __init__(self) -> None:
        self.api = HfApi()

    def revision(self, repo: str, revision: str) -> str:
        """The full revision of a repository. ValueError says what to do if it cannot be read."""
        page = f"{self.api.endpoint}/datasets/{repo}"
        token = (
            "the token that HF_TOKEN holds is not of an account that did"
            if get_token()
            else "HF_TOKEN is not set"
        )
        try:
            self.api.auth_check(repo, repo_type="dataset")
            found = self.api.dataset_info(repo, revision=revision).sha
        except hub_errors.GatedRepoError as error:
            raise ValueError(f"gated: accept its agreement at {page} and set HF_TOKEN ({token})") from error
        except hub_errors.RevisionNotFoundError as error:
            raise ValueError(f"has no revision {revision!r}; see {page}/commits/main") from error
        except hub_errors.RepositoryNotFoundError as error:
            raise ValueError(f"not found at {page}, or private and {token}") from error
        except (
            Exception
        ) as error:  # no network, a proxy, a server error: in any case the other sources are checked
            raise ValueError(f"{NOT_REACHABLE} at {page}: {type(error).__name__}: {error}") from error
        if found is None or len(found) != 40:
            raise ValueError(
                f"revision {revision!r} has the commit {found!r} at {page}, which is not 40 hex digits"
            )
        return found

    def files(self, repo: str, revision: str, folder: str) -> list[File]:
        """All Parquet files below exactly this folder, by path; none when there is no such folder."""
        try:
            tree = list(
                self.api.list_repo_tree(repo, folder, recursive=True, revision=revision, repo_type="dataset")
            )
        except hub_errors.EntryNotFoundError:
            return []
        found = [entry for entry in tree if isinstance(entry, RepoFile) and entry.path.endswith(".parquet")]
        return sorted(
            File(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else None) for entry in found
        )

    def folders(self, repo: str, revision: str) -> list[str]:
        tree = self.api.list_repo_tree(repo, revision=revision, repo_type="dataset")
        return sorted(entry.path for entry in tree if isinstance(entry, RepoFolder))

    def open(self, repo: str, revision: str, path: str) -> BinaryIO:
        files: Any = HfFileSystem(endpoint=self.api.endpoint)
        return files.open(f"datasets/{repo}@{revision}/{path}", "rb", block_size=1 << 20)

    def fetch(self, repo: str, revision: str, path: str, target: Path) -> None:
        """Copy a file to `target`, in an otherwise empty folder."""
        disable_progress_bars()  # `run` shows its own
        folder = target.with_name("download")
        try:
            got = hf_hub_download(repo, path, repo_type="dataset", revision=revision, local_dir=folder)
            os.replace(got, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class Mirror:
    """A copy of repositories in a folder or behind a URL. It has no commits: the revision is not checked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.system, self.root = fsspec.url_to_fs(url)
        self.remote = not is_local(self.system)

    def revision(self, repo: str, revision: str) -> str:
        if not self.system.isdir(f"{self.root}/{repo}"):
            raise ValueError(f"the mirror {self.url} has no folder {repo}")
        return revision

    def files(self, repo: str, revision: str, folder: str) -> list[File]:
        start = f"{self.root}/{repo}/"
        found = self.system.find(f"{start}{folder}", detail=True).values()
        entries = [(entry["name"].removeprefix(start), entry["size"]) for entry in found]
        return sorted(File(path, size) for path, size in entries if path.endswith(".parquet"))

    def folders(self, repo: str, revision: str) -> list[str]:
        found = self.system.ls(f"{self.root}/{repo}", detail=True)
        return sorted(Path(entry["name"]).name for entry in found if entry["type"] == "directory")

    def open(self, repo: str, revision: str, path: str) -> BinaryIO:
        return self.system.open(f"{self.root}/{repo}/{path}", "rb")

    def fetch(self, repo: str, revision: str, path: str, target: Path) -> None:
        copy_or_link(self.system, f"{self.root}/{repo}/{path}", target)


def copy_or_link(system: Any, source: str, target: Path) -> None:
    """A file of an fsspec file system; a link needs no space."""
    if is_local(system) and os.path.exists(source):
        with suppress(OSError):  # another disk, or a file system without links
            return os.link(os.path.realpath(source), target)  # Linux would link a symbolic link itself
    system.get_file(source, str(target))


def is_local(system: Any) -> bool:
    return isinstance(system, fsspec.implementations.local.LocalFileSystem)


Origin = Hub | Mirror


def origin(mirror: str | None) -> Origin:
    return Mirror(mirror) if mirror else Hub()
