"""laneformer serve: the OpenAI-compatible server, with the playground as its page."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import webbrowser
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.console import Console

from ..serve.loading import Loading
from ..serve.options import ServerOptions
from .names import display_name, located
from .options import ModelFlags, ModelOptions


@dataclass
class Serve:
    """Serve a model to OpenAI clients, and a playground to browsers, until Ctrl-C or SIGTERM.

    Needs the extra `serve`, and `grammar` for JSON schemas and tools: pip install '.[serve,grammar]'.
    """

    hf_dir: tyro.conf.Positional[Path]
    """Folder with config.json, model*.safetensors and tokenizer.json, a GGUF file, or a model's name:
    HuggingFaceTB/SmolLM2-135M-Instruct, owner/name:Q4_K_M, or one that `laneformer models` lists.
    """
    model_name: str | None = None
    """What clients call the model; default: the folder's name."""
    host: str = ServerOptions.host
    """Address to listen on; 0.0.0.0 is all of this machine's: set an API key then."""
    port: int = ServerOptions.port
    """0 is a free one; the address is printed. With --open, one that is in use becomes the next."""
    api_key: str | None = ServerOptions.api_key
    """What clients must send as "Authorization: Bearer KEY"; default: LANEFORMER_API_KEY of the environment,
    which other users of the machine cannot see.
    """
    host_names: tuple[str, ...] = ServerOptions.host_names
    """Names by which browsers may call the server, beside localhost and addresses."""
    allowed_origins: tuple[str, ...] = ServerOptions.allowed_origins
    """Pages of other sites that may use the server, as https://notes.example; * is all of them."""
    max_waiting: int = ServerOptions.max_waiting
    """Requests that wait while others decode; a further one gets status 429."""
    deadline_s: float = ServerOptions.deadline_s
    """Longest time of a request, its waiting included."""
    grace_s: float = ServerOptions.grace_s
    """After SIGTERM, for the requests that run."""
    max_body_bytes: int = ServerOptions.max_body_bytes
    """Of one request."""
    keep_alive_s: float = ServerOptions.keep_alive_s
    """Longest silence of a stream, while a long prompt is read, before a comment is sent."""
    speculate: int = ServerOptions.speculate
    """Most draft tokens to verify in one pass, of requests that do not say; the answers stay the same. 0: none."""
    reasoning_budget: int = ServerOptions.reasoning_budget
    """Most tokens between <think> and </think>, of requests that do not say; then the end tag is forced. -1: any."""
    strict: bool = ServerOptions.strict
    """Refuse fields that are unknown or without effect, instead of naming them in the header `warnings`."""
    link_us: float = ServerOptions.link_us
    """Microseconds after which a lane sees what lanes of other threads wrote, as over a link of that latency; how much
    of the speed is left is measured at the start, and stands on the page. CPU only.
    """
    open: bool = False
    """Open the playground in this machine's browser."""
    model: ModelFlags = field(default_factory=ModelOptions)

    def run(self) -> None:
        names = {field.name for field in dataclasses.fields(ServerOptions)} - {"model"}
        name = self.model_name or display_name(
            self.hf_dir if ":" in self.hf_dir.name else self.hf_dir.resolve()
        )
        options = ServerOptions(
            name, **{key: getattr(self, key) for key in names}
        )  # errors show before the weights load
        from ..serve.app import run  # imports what the extra brings

        path = located(self.hf_dir)
        # until the server runs; the first process of a container ignores a signal that it does not handle
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with options.listen(or_next=self.open) as listening:
            with Loading(listening), Console(stderr=True).status("loading weights"):
                engine = self.model.load(path)
            with engine:
                run(engine, options, open_page if self.open else None, listening)


def open_page(address: str) -> None:
    """Without a display nothing: the browsers of a text terminal would take it over."""
    if sys.platform in ("darwin", "win32") or {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"} & set(os.environ):
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
