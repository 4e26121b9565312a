"""The `laneformer` command: talk with a model, serve it, generate text, list models, and measure decode speed."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

from .. import __version__
from ..engine.decoder import EngineLost, RequestFailed
from .bench import Bench
from .chat import Chat
from .generate import Generate
from .names import Models
from .serve import Serve

Command = (
    Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Models, tyro.conf.subcommand("models")]
)


def main(arguments: list[str] | None = None) -> None:
    """Run one subcommand; a user error prints one line and exits with status 2, a failure of
    the engine with 1.
    """
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"laneformer {__version__}")
        return
    try:
        tyro.cli(Command, args=arguments, prog="laneformer", description=__doc__).run()
    except ValueError as error:
        print(f"laneformer: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (RequestFailed, EngineLost) as error:
        print(f"laneformer: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
