"""What `tools.bench serve` measures with: a client that notes when each event comes, and the servers that it asks."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.harness import ROOT, version
from tools.bench.llamacpp import FOLDER

START_S = 120.0
TIMEOUT_S = 300.0
EVENT = re.compile(rb"data: (\{.*?\})\r?\n\r?\n", re.DOTALL)
LLAMA_CPP = f"import sys; sys.path.append({str(FOLDER)!r}); from llama_cpp.server.__main__ import main; main()"


@dataclass
class Answer:
    """When each text of a streamed request came, in seconds from its sending; sent_s by time.perf_counter()."""

    sent_s: float
    arrivals_s: np.ndarray
    finish_reason: str | None


@dataclass
class Server:
    """A server process, started by `with`. several: it decodes several requests at a time."""

    name: str
    command: Sequence[str]
    about: str = ""
    several: bool = True
    missing: str = ""  # how to install it

    def __enter__(self) -> Server:
        """RuntimeError with its last lines where it does not come up."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log, end_s = tempfile.TemporaryFile("w+"), time.monotonic() + START_S
        command = [*self.command, "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, cwd=ROOT)
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end_s:
                self.__exit__()
                self.log.seek(0)
                raise RuntimeError(f"{self.name} did not start: {' '.join(command)}\n{self.log.read()[-1500:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), contextlib.closing(self._connection()) as connection:
            connection.request("GET", "/v1/models")
            return connection.getresponse().status == 200
        return False

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)

    def ask(self, path: str, over: threading.Event | None = None, **body: Any) -> Answer:
        """Stream one greedy answer, or until `over` is set. What came is parsed after the last byte."""
        payload = json.dumps({"model": "model", "stream": True, "temperature": 0, **body})
        pieces, times, finish_reason, sent_s = list[tuple[float, bytes]](), list[float](), None, time.perf_counter()
        with contextlib.closing(self._connection()) as connection:
            connection.request("POST", path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{self.name}: status {response.status} of {path}: {response.read()[:500]!r}")
            while not (over and over.is_set()) and (piece := response.read1(65536)):
                pieces.append((time.perf_counter() - sent_s, piece))
        ends = np.cumsum([len(piece) for _, piece in pieces])
        for found in EVENT.finditer(b"".join(piece for _, piece in pieces)):
            for choice in json.loads(found[1]).get("choices", []):
                if choice.get("text") or choice.get("delta", {}).get("content"):
                    times.append(pieces[int(np.searchsorted(ends, found.end()))][0])
                finish_reason = choice["finish_reason"] or finish_reason
        if not times:
            raise RuntimeError(f"{self.name}: an answer without text: {pieces[-3:]}")
        return Answer(sent_s, np.array(times), finish_reason)


def together(requests: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """The answers of requests that run at the same time."""
    with ThreadPoolExecutor(len(requests)) as threads:
        return [future.result() for future in [threads.submit(request) for request in requests]]


def ours(model: Path, dtype: str, threads: int, math: str = "auto") -> Server:
    command = [sys.executable, "-m", "laneformer.cli", "serve", str(model), "--threads", str(threads), "--model-name"]
    about = f"laneformer {version('laneformer')}, dtype {dtype}, math {math}"
    return Server("laneformer", [*command, "model", "--dtype", dtype, "--math", math], about)


def llama_servers(model: Path, threads: int, streams: int, context: int) -> list[Server]:
    """llama.cpp's own, and that of its Python package, which runs one request at a time."""
    found = shutil.which("llama-server", path=f"{FOLDER}/bin") or shutil.which("llama-server")
    missing = "" if found else f"put it on the PATH or into {FOLDER}/bin; llama-cpp-python's sdist has its source"
    flags = ["-m", str(model), "-t", str(threads), "-np", str(streams), "-c", str(streams * context), "-kvu"]
    own = Server("llama-server", [str(found), *flags], f"{streams} slots, {model.name}", True, missing)
    there = all((FOLDER / name).exists() for name in ("llama_cpp/server", "sse_starlette", "starlette_context"))
    missing = "" if there else f"{sys.executable} -m pip install --target {FOLDER} 'llama-cpp-python[server]'"
    flags = ["--model", str(model), "--n_threads", str(threads), "--n_threads_batch", str(threads)]
    flags += ["--n_ctx", str(context), "--interrupt_requests", "False"]  # True: a further one ends the first
    about = f"llama-cpp-python {version('llama-cpp-python')}, one request at a time, {model.name}"
    return [own, Server("llama_cpp.server", [sys.executable, "-c", LLAMA_CPP, *flags], about, False, missing)]


def null() -> Server:
    """Writes as fast as it can: what the client and HTTP cost."""
    return Server("null", [sys.executable, "-m", "tools.bench.serve_client"])


class Null(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def do_POST(self) -> None:
        tokens = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["max_tokens"]
        self.do_GET()
        choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": "length"}
        chunk = {"id": "x" * 32, "object": "text_completion", "created": 0, "model": "null", "choices": [choice]}
        event = b"data: %b\n\n" % json.dumps(chunk).encode()
        for _ in range(tokens):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Null).serve_forever()
