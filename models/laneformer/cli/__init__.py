"""The `laneformer` command: talk with a model, serve it, generate text, and measure decode speed."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

from ..engine.decoder import EngineLost, RequestFailed
from .bench import Bench
from .chat import Chat
from .generate import Generate
from .serve import Serve

Command = (
    Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


def main(arguments: list[str] | None = None) -> None:
    """Run one subcommand; a user error prints one line and exits with status 2, a failure of
    the engine with 1.
    """
    command = tyro.cli(Command, args=arguments, prog="laneformer", description=__doc__)
    try:
        command.run()
    except ValueError as error:
        print(f"laneformer: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (RequestFailed, EngineLost) as error:
        print(f"laneformer: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
