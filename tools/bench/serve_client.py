"""What `tools.bench serve` measures with: a client that notes when each event comes, and the
servers that it asks.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.bench.harness import ROOT, version
from tools.bench.llamacpp import FOLDER
from train.supervise.attempt import hold_port

START_S, TIMEOUT_S = 120.0, 300.0
EVENT = re.compile(rb"data: (\{.*?\})\r?\n\r?\n", re.DOTALL)
LLAMA_CPP = (
    f"import sys; sys.path.append({str(FOLDER)!r}); from llama_cpp.server.__main__ import main; main()"
)


class Answer(NamedTuple):
    sent_s: float  # time.perf_counter()
    arrivals_s: np.ndarray  # of each text, from then on
    tokens: int  # texts, where the answer ended before its limit
    ttft_s: float
    tokens_per_s: float


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
        self.holder, self.log, end_s = hold_port(), tempfile.TemporaryFile("w+"), time.monotonic() + START_S
        self.port = self.holder.getsockname()[1]
        command = [*self.command, "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, cwd=ROOT)
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end_s:
                self.log.seek(0)
                self.process.kill()
                raise RuntimeError(f"{self.name} did not start: {self.log.read()[-1500:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        self.holder.close()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models"):
            return True
        return False

    def ask(self, path: str, over: threading.Event | None = None, **body: Any) -> Answer:
        """Stream one greedy answer, or until `over` is set. What came is parsed after the last byte."""
        payload = json.dumps({"model": "model", "stream": True, "temperature": 0, **body})
        pieces, times, finish_reason = list[tuple[float, bytes]](), list[float](), None
        sent_s = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("POST", path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(
                    f"{self.name}: status {response.status} of {path}: {response.read()[:500]!r}"
                )
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
        tokens = body["max_tokens"] if finish_reason == "length" else len(times)
        return Answer(
            sent_s, np.array(times), tokens, times[0], (tokens - 1) / max(times[-1] - times[0], 1e-9)
        )


def ours(model: Path, dtype: str, threads: int) -> Server:
    flags = ["serve", str(model), "--threads", str(threads), "--model-name", "model", "--dtype", dtype]
    flags += ["--speculate", "0"]  # a token at a time, as the others
    command = [sys.executable, "-m", "laneformer.cli", *flags]
    return Server("laneformer", command, f"laneformer {version('laneformer')}, dtype {dtype}")


def llama_servers(model: Path, threads: int, streams: int, context: int) -> list[Server]:
    found = shutil.which("llama-server", path=f"{FOLDER}/bin") or shutil.which("llama-server")
    flags = ["-m", str(model), "-t", str(threads), "-np", str(streams), "-c", str(streams * context), "-kvu"]
    how = f"put it on the PATH or into {FOLDER}/bin; llama-cpp-python's sdist has its source"
    own = Server(
        "llama-server", [str(found), *flags], f"{streams} slots, {model.name}", True, "" if found else how
    )
    flags = ["--model", str(model), "--n_threads", str(threads), "--n_threads_batch", str(threads)]
    flags += ["--n_ctx", str(context), "--interrupt_requests", "False"]  # True: a further one ends the first
    there = all(
        (FOLDER / name).exists() for name in ("llama_cpp/server", "sse_starlette", "starlette_context")
    )
    how = "" if there else f"{sys.executable} -m pip install --target {FOLDER} 'llama-cpp-python[server]'"
    command = [sys.executable, "-c", LLAMA_CPP, *flags]
    return [own, Server("llama_cpp.server", command, f"one request at a time, {model.name}", False, how)]


class Null(BaseHTTPRequestHandler):
    # it writes as fast as it can: what the client and HTTP cost
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def do_POST(self) -> None:
        tokens = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["max_tokens"]
        self.do_GET()
        choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": "length"}
        chunk = {
            "id": "x" * 32,
            "object": "text_completion",
            "created": 0,
            "model": "null",
            "choices": [choice],
        }
        event = b"data: %b\n\n" % json.dumps(chunk).encode()
        for part in [*[event] * tokens, b""]:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Null).serve_forever()
