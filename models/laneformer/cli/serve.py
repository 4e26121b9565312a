"""laneformer serve: the OpenAI-compatible server, with the playground as its page."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import webbrowser
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from ..serve.loading import answer_loading
from ..serve.options import ServerOptions
from .names import display_name, locate_model
from .options import ModelName, ModelOptions


@dataclass
class Serve:
    """Serve a model through the APIs of OpenAI, Anthropic and Ollama, with a playground for browsers.

    Needs the extra `serve`, and `grammar` for JSON schemas and tools: pip install '.[serve,grammar]'.
    """

    hf_dir: ModelName
    options: Annotated[ServerOptions, tyro.conf.arg(name="")]
    model: ModelOptions
    open: bool = False
    """Open the playground in this machine's browser."""

    def run(self) -> None:
        # Not at the top: it needs the packages of the extra `serve`
        from ..serve.app import run

        # A relative folder, such as ., has no name before it is resolved
        folder = self.hf_dir if ":" in self.hf_dir.name else self.hf_dir.resolve()
        name = self.options.model_name or display_name(folder)
        options = dataclasses.replace(self.options, model_name=name)
        path = locate_model(self.hf_dir)
        # Until the server handles it: the first process of a container ignores unhandled signals
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with options.listen(or_next=self.open) as listening:
            with answer_loading(listening), Console(stderr=True).status("loading weights"):
                engine = self.model.load(path)
            with engine:
                run(engine, options, open_page if self.open else None, listening)


def open_page(address: str) -> None:
    # Without a display, a text browser would take over the terminal
    if sys.platform in ("darwin", "win32") or {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"} & set(
        os.environ
    ):
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
