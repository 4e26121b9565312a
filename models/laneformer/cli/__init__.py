"""Talk with a language model, serve it, generate text, list models, and measure decode speed."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import sys
from typing import Any, NoReturn

import tyro

from .. import __version__
from ..engine.decoder import EngineLost, RequestFailed
from .bench import Bench
from .chat import Chat
from .generate import Generate
from .names import Models
from .serve import Serve

Command = Chat | Serve | Generate | Bench | Models  # subcommands of these names


def main(arguments: list[str] | None = None) -> None:
    """Run a subcommand; exit with 2 after an error of the user or system, 1 of the engine."""
    try:
        prepare_streams()
        try:
            run_command(arguments)
        finally:
            flush_output()
    except BrokenPipeError:
        # The reader has closed the pipe, as `| head` does: exit without a message
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        raise_exit(f"{place}{error.strerror or error}", 2)
    except ValueError as error:
        raise_exit(str(error), 2)
    except (RequestFailed, EngineLost) as error:
        raise_exit(str(error), 1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def prepare_streams() -> None:
    """Open closed streams, and escape what the output's encoding cannot write."""
    # A shell's >&- leaves the stream closed; its output is discarded
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def run_command(arguments: list[str] | None) -> None:
    # tyro has no flag that only prints the version
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"laneformer {__version__}")
        return
    command = tyro.cli(
        Command,
        args=arguments,
        prog="laneformer",
        description=__doc__,
        config=[tyro.conf.OmitArgPrefixes],
    )
    refuse_other_text(command)
    command.run()


def refuse_other_text(options: Any) -> None:
    """Raise ValueError for a text that is not UTF-8; paths may have any bytes."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            refuse_other_text(value)
        for text in value if isinstance(value, tuple) else (value,):
            # Python decodes bytes that are not UTF-8 as U+DC80 to U+DCFF
            if isinstance(text, str) and any("\udc80" <= letter <= "\udcff" for letter in text):
                name = field.name.replace("_", "-")
                raise ValueError(f"--{name} is not UTF-8: {os.fsencode(text)!r:.80}")


def flush_output() -> None:
    """Flush stdout while a failure still has a handler."""
    try:
        print(end="", flush=True)
    except OSError:
        # The interpreter flushes again at exit, where an error would print a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def raise_exit(sentence: str, status: int) -> NoReturn:
    print(f"laneformer: {sentence}", file=sys.stderr)
    raise SystemExit(status) from None
