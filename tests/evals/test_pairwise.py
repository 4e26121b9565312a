"""The pairwise judge: each pair in both orders, and a judge that prefers a position decides nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from evals.pairwise import main, read_pairs
from evals.scorer import Source
from records.evals import About
from records.items import read_items
from tests.evals.core.core_assets import write_laneformer
from tests.records.test_fields import check as check_fields

ANSWERS = ("the best one", "the worst one", "as good", "mute", "always A")


class Judge(BaseHTTPRequestHandler):
    """Prefers the best answer and never the worst; says nothing, or A, where an answer asks for it."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "judge"
        a, _, b = body["messages"][0]["content"].partition("[Answer A]")[2].partition("[Answer B]")
        b = b.partition("Reply with")[0]
        said = "tie."
        if "the best" in a or "the worst" in b or "always A" in a + b:
            said = "Answer B has no merit.\nA"
        elif "the best" in b or "the worst" in a:
            said = "**b**"
        elif "mute" in a + b:
            said = "I cannot say"
        content = json.dumps(
            {"choices": [{"index": 0, "message": {"content": said}, "finish_reason": "stop"}]}
        )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *unused: object) -> None:
        pass


@pytest.fixture
def judge_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


@pytest.mark.rotate
def test_each_pair_is_judged_in_both_orders(tmp_path: Path, judge_url: str) -> None:
    model, data = tmp_path / "hf", tmp_path / "questions.jsonl"
    write_laneformer(model)
    pairs = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(ANSWERS)]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    out, answers = tmp_path / "run/evals.jsonl", tmp_path / "answers.jsonl"
    record = main(
        model, data, judge_url, "judge", max_new_tokens=2, answers=answers, source=Source(device="cpu"),
        about=About(out, 3),
    )  # fmt: skip
    check_fields(record, None)
    _, lines = read_items(out.parent / record["items"])
    expected = [[0, 0], [1, 1], [0.5, 0.5], [None, None], [1, 0]]
    assert [line["verdicts"] for line in lines.values()] == expected, "as A, as B"
    assert [line["right"] for line in lines.values()] == [0, 1, 0.5, 0.5, 0.5]
    assert (record["questions"], record["score"], record["order_decided"], record["unreadable"]) == (
        5,
        0.5,
        1,
        2,
    )
    # deviations of -1/2, 1/2, 0, 0, 0: a sum of squares of 1/2, four degrees of freedom, five questions
    assert record["standard_error"] == pytest.approx((0.5 / 4 / 5) ** 0.5)
    assert [pair["question"] for pair in read_pairs(answers)] == [pair["question"] for pair in pairs]


def test_lines_that_are_no_pairs_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text('{"question": "?", "answer": "!"}\n{"question": "?"}\n')
    with pytest.raises(ValueError, match=r'questions.jsonl:2: not {"question", "answer"}, both text'):
        read_pairs(data)
    data.write_text('{"question": "?", "answer": "!"}\n')
    with pytest.raises(ValueError, match="holds 1 questions; at least two"):
        read_pairs(data)
