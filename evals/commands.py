"""The commands that `[evals]` may name: modules of evals/ that declare COMMAND, and what
each of them accepts.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import evals
from evals.scorer import devices_of
from records.evals import EvalCommand, option_value
from records.job import JobSections


def check(job: JobSections) -> None:
    """Refuse an `[evals]` that selects nothing, or a command that cannot run on a checkpoint (ValueError)."""
    section = job.evals
    if section.every_steps < 1:
        raise ValueError(
            f"evals.every_steps = {section.every_steps} selects no checkpoint; set [evals] every_steps"
        )
    if not section.commands:
        raise ValueError('evals.commands is empty; for example commands = ["bits_per_byte --data data/demo"]')
    for command in section.commands:
        _, kind, options = read_command(command)
        try:
            kind.check(options)
        except ValueError as problem:
            raise ValueError(f"evals.commands: {command!r}: {problem}") from None


def read_command(command: str) -> tuple[str, EvalCommand, list[str]]:
    """(module to run, its type, options) of a command line. Raises ValueError if it names no command."""
    name, *options = shlex.split(command) or [""]
    modules = command_modules()
    if name not in modules:
        raise ValueError(
            f"evals.commands: {command!r} begins with no evaluation, {choice(name, sorted(modules))}"
        )
    return f"evals.{name}", importlib.import_module(modules[name]).COMMAND, options


def command_modules() -> dict[str, str]:
    """{command: the module that declares its COMMAND}; imports nothing."""
    found = {}
    for module in pkgutil.iter_modules(evals.__path__):
        name = f"{module.name}.__main__" if module.ispkg else module.name
        path = Path(evals.__path__[0], *name.split(".")).with_suffix(".py")
        if path.is_file() and re.search(
            r"^COMMAND = EvalCommand\(", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            found[module.name] = f"evals.{name}"
    return found


def choice(name: str, names: Sequence[str], most: int = 99) -> str:
    """The end of an error message: what may stand in place of a name, of more than `most`
    names only the nearest.
    """
    near = difflib.get_close_matches(name, names, n=1)
    all_of_them = f"choose from {', '.join(names)}" if len(names) <= most else f"but {len(names):,} others"
    return f"{all_of_them}{f'; nearest: {near[0]}' if near else ''}"


def check_machine(job: JobSections) -> None:
    """Refuse what cannot run on this machine (ValueError): a missing file, GPU or
    program, before any checkpoint.
    """
    for command in job.evals.commands:
        _, kind, options = read_command(command)
        try:
            for name in kind.reads:
                value = option_value(name, options)
                if value and not Path(value).exists():
                    raise ValueError(f"{name} {value} does not exist here")
            device = option_value("--device", options) or job.evals.device
            if "cuda" in device:
                devices_of(device)
            kind.ready(options)
        except ValueError as problem:
            raise ValueError(f"evals.commands: {command!r} cannot run here: {problem}") from None
