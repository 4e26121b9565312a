"""Faults planted in the kernels' source for the emulator: one build holds all of them."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from laneformer.engine.cuda.compile import FOLDER, source_of

Patch = tuple[str, str, str]  # file, was, now
HERE = "HERE"  # in `now`: this fault is in force
DECLARATION = 'extern "C" {\nint planted = 0;\n}\n'


def plant_all(kernels, builds, faults: Iterable[Patch]):
    """Build the shape from sources with these faults, numbered from 1 on, none in force."""
    with tempfile.TemporaryDirectory() as copy:
        folder = Path(copy)
        shutil.copytree(
            FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"), dirs_exist_ok=True
        )
        for number, (file, original, faulty) in enumerate(faults, 1):
            content = (folder / file).read_text()
            assert content.count(original) == 1, (
                f"{file} holds {content.count(original)} times: {original}"
            )
            (folder / file).write_text(
                content.replace(original, faulty.replace(HERE, f"(planted == {number})"))
            )
        source = DECLARATION + source_of(kernels.version, kernels.geometry)
        kernels.library = kernels.build(source, builds, folder)
        vars(kernels).pop("libraries", None)  # of the sound ones
    put_in_force(kernels, 0)  # a library that this process has loaded before keeps its number


def put_in_force(kernels, number):
    """Number 0 puts none in force."""
    ctypes.c_int.in_dll(kernels.library, "planted").value = number
