"""What commands share: numbers with a range, and how a command ends.

def main(runs: Count = 3, share: Positive = 0.5) -> None:
    check_ranges(main, locals())

if __name__ == "__main__":
    run_function("tools.x", main)
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Percent = Annotated[float, Field(gt=0, le=100)]


def check_ranges(annotated: Any, values: Mapping[str, Any]) -> None:
    """Refuse arguments outside of the range that their annotation states.

    Args:
        annotated: the function or the dataclass with the annotations.
        values: the arguments by name.

    Raises:
        ValueError: with the option and its value.
    """
    for name, hint in get_type_hints(annotated, include_extras=True).items():
        if name == "return":
            continue
        try:
            TypeAdapter(hint).validate_python(values[name])
        except ValidationError as error:
            first = error.errors()[0]
            option = name.replace("_", "-")
            message = first["msg"].replace("Input", "it")
            raise ValueError(f"--{option} {first['input']}: {message}") from None


def refuse_unknown_options(words: Sequence[str]) -> None:
    """Raise ValueError for an option without a section, among those for the trainer."""
    for word in words:
        if word.startswith("--") and "." not in word.partition("=")[0]:
            raise ValueError(
                f"unknown option {word}; see --help, or write --section.key for the trainer"
            )


def run_function(name: str, function: Callable[..., object]) -> None:
    """Run the function with the command line of `python -m NAME`; print what it returns, as JSON."""
    import tyro

    def run() -> None:
        result = tyro.cli(function, prog=f"python -m {name}")
        if result is not None:
            print(json.dumps(result))

    run_command(name, run)


def run_command(
    name: str,
    main: Callable[[], object],
    status: int | None = None,
    interrupted: str = "interrupted",
) -> None:
    """Run a command; what a user or the system got wrong ends it with one sentence.

    Args:
        name: begins the sentence.
        status: exit status of such an end; None: 1, and the sentence is that of the SystemExit.
        interrupted: what Ctrl-C and SIGTERM print.
    """
    # SIGTERM as an exception: half-written folders are removed, trainers save, whoever ends this
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        try:
            main()
        finally:
            # flushed here, where a closed pipe still has a handler
            sys.stdout.flush()
    except BrokenPipeError:
        # `head` has closed the pipe; Python would fail again when it flushes stdout at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except KeyboardInterrupt:
        print(f"{name}: {interrupted}", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, OSError) as error:
        if status is None:
            raise SystemExit(f"{name}: {error}") from None
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(status) from None
    finally:
        signal.signal(signal.SIGTERM, before)
