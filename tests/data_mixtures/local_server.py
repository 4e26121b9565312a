"""Flask applications that answer in threads of the test's process."""

from __future__ import annotations

import threading
from typing import Self

from flask import Flask
from werkzeug.serving import make_server


class LocalServer:
    """`with` it, the application answers at self.url; a subclass adds its routes to self.app."""

    def __init__(self) -> None:
        self.app = Flask(type(self).__name__, static_folder=None)
        # port 0: the system chooses a free one, so tests can run side by side
        self.server = make_server("127.0.0.1", 0, self.app, threaded=True)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()
