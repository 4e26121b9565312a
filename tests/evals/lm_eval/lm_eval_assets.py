"""What the lm-eval tests run on: a tiny bf16 export, hand-made data sets in lm-eval's layout,
and a toy server.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from laneformer.engine import Engine
from laneformer.engine.text import StopStrings, TextStream, text_of
from laneformer.hf.export import export
from tests.laneformer.hf.hf_assets import VOCAB_SIZE, random_model, sentencepiece_model

CONTEXT = 512
QUESTIONS = [
    ("Which gas do plants take in?", ["oxygen", "carbon dioxide", "helium", "nitrogen gas"], 1),
    ("What pulls a stone to the ground?", ["gravity", "light", "sound"], 0),
    ("Which of these is a mammal?", ["a trout", "a wren", "a bat", "an ant"], 2),
    ("What does a thermometer measure?", ["mass", "time", "length", "temperature"], 3),
    ("Which planet is closest to the sun?", ["Mercury", "Earth", "Mars", "Saturn"], 0),
]


def export_tiny(folder: Path, context: int = CONTEXT, vocab_size: int = VOCAB_SIZE, **tokenizer: Any) -> Path:
    """A random bf16 model whose choices depend on the text, with its tokenizer, as an HF folder."""
    run = folder / "run"
    run.mkdir()
    model = random_model(max_position_embeddings=context, vocab_size=vocab_size)
    (run / "model.json").write_text(json.dumps(model.config.to_dict()))
    (run / "tokenizer.model").write_bytes(sentencepiece_model(vocab_size=vocab_size, **tokenizer))
    dcp.save(model.state_dict(), checkpoint_id=run / "checkpoint" / "step-1", no_dist=True)
    export(run / "checkpoint" / "step-1", folder / "hf", "bfloat16")
    return folder / "hf"


def write_data(folder: Path, questions: Sequence[tuple[str, list[str], int]] = QUESTIONS) -> Path:
    """ARC's two sets of a few rows and two short essays, where lm-eval looks for them."""
    arc = folder / "allenai" / "ai2_arc"
    arc.mkdir(parents=True)
    header = ["---", "configs:"]
    for config, prefix in (("ARC-Easy", ""), ("ARC-Challenge", "In short: ")):
        header += [f"- config_name: {config}", "  data_files:"]
        for split in ("train", "validation", "test"):
            header += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
            lines = []
            for i, (question, texts, gold) in enumerate(questions):
                labels = list("ABCD"[: len(texts)])
                choices = {"text": texts, "label": labels}
                row = {
                    "id": str(i),
                    "question": prefix + question,
                    "choices": choices,
                    "answerKey": labels[gold],
                }
                lines.append(json.dumps(row) + "\n")
            (arc / config).mkdir(exist_ok=True)
            (arc / config / f"{split}.jsonl").write_text("".join(lines))
    (arc / "README.md").write_text("\n".join([*header, "---", ""]))
    essays = folder / "baber" / "paul_graham_essays"
    essays.mkdir(parents=True)
    texts = [
        "Dr. Ames met Mr. Low at 5 p.m. They spoke. Dr. Ames left.",
        "It rained, e.g. on Mr. Low. He ran. He fell.",
    ]
    (essays / "train.jsonl").write_text("".join(json.dumps({"text": text * 200}) + "\n" for text in texts))
    return folder


@contextmanager
def toy_server(engine: Engine, missing: int = 0) -> Iterator[str]:
    """The base URL of a server that answers /completions as lm-eval needs it; `missing` scores
    short, as some do.
    """

    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = scored if body.get("echo") else generated
            with one_at_a_time:
                choices = [{"index": i, **answer(engine, ids, body)} for i, ids in enumerate(body["prompt"])]
            for choice in choices:
                if "logprobs" in choice and missing:
                    choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:-missing]
            payload = json.dumps({"object": "text_completion", "choices": choices}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def scored(engine: Engine, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
    new = engine.generate(ids, max_new_tokens=body["max_tokens"], ignore_eos=True)
    scores = engine.logprobs(ids + new, top=1)
    best = zip(scores.top_ids[:, 0].tolist(), scores.top_logprobs[:, 0].tolist(), strict=True)
    top = [None, *({str(i): logprob} for i, logprob in best)]
    return {
        "text": "",
        "logprobs": {"token_logprobs": [None, *scores.logprobs.tolist()], "top_logprobs": top},
    }


def generated(engine: Engine, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
    assert engine.tokenizer is not None
    assert body["temperature"] == 0
    tokens = engine.stream(ids, max_new_tokens=body["max_tokens"])
    return {
        "text": "".join(text_of(tokens, TextStream(engine.tokenizer, ids), StopStrings(body.get("stop", []))))
    }
