"""The commands that `[evals]` may name: a module of evals/ for each kind of record, which declares COMMAND, and
what each of them accepts.
"""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

from data_mixtures.recipe import nearest
from evals.scorer import resolve_device
from records.evals import FIELDS, EvalCommand
from records.job import JobSections, option_value


def check(job: JobSections, here: bool = False) -> None:
    """Refuse an `[evals]` that selects nothing, or a command that cannot run on a checkpoint.

    Args:
        here: also one that cannot run on this machine.
    """
    section = job.evals
    if section.every_steps < 1:
        raise ValueError(
            f"evals.every_steps = {section.every_steps} selects no checkpoint; set [evals] every_steps"
        )
    if not section.commands:
        raise ValueError(
            'evals.commands is empty; for example commands = ["bits_per_byte --data data/demo"]'
        )
    for command in section.commands:
        _, kind, options = read_command(command)
        try:
            kind.check(options)
            if not here:
                continue
            for name in kind.reads:
                value = option_value(name, options)
                if value and not Path(value).exists():
                    raise ValueError(f"{name} {value} does not exist here")
            device = option_value("--device", options) or section.device
            if "cuda" in device:
                resolve_device(device)
            kind.ready(options)
        except ValueError as problem:
            raise ValueError(f"evals.commands: {command!r}: {problem}") from None


def read_command(command: str) -> tuple[str, EvalCommand, list[str]]:
    """Return (module, its type, options) of a command line."""
    name, *options = shlex.split(command) or [""]
    if name not in FIELDS:
        near = nearest(name, sorted(FIELDS), "choose from")
        raise ValueError(f"evals.commands: {command!r} begins with no evaluation, {near}")
    module = f"evals.{name}"
    # a package declares its command in __main__
    is_package = Path(__file__).with_name(name).is_dir()
    declares = importlib.import_module(f"{module}.__main__" if is_package else module)
    return module, declares.COMMAND, options
