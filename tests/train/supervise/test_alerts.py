"""Tests that alerts arrive, once a kind, and that nothing waits for a silent server."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from records.events import record_event
from records.files import read_lines
from train.supervise.alerts import Alerts
from train.supervise.supervisor import Options, Supervisor


@pytest.fixture
def answer():
    # set when somebody gives up
    return threading.Event()


@pytest.fixture
def posts(job, answer, monkeypatch):
    # what the job's webhook receives; a text that holds "hang" waits for `answer`
    received: list[dict[str, Any]] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            post = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append(post)
            text = post["text"]
            if "give up" in text:
                answer.set()
            if "hang" in text:
                answer.wait(200)
            self.send_response(500 if "broken" in text else 200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("localhost", 0), Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OUR_WEBHOOK", f"http://localhost:{server.server_port}/a-secret")
    job.alerts.webhook_env = "OUR_WEBHOOK"
    yield received
    server.shutdown()


def test_a_kind_is_sent_once_and_counted(job, posts):
    alerts = Alerts(job)
    for number in range(3):
        alerts.send("bad_node", f"n{number}", step=7)
    alerts.send("give_up", "three attempts")
    alerts.close()
    assert sorted(post["text"] for post in posts) == [
        "run: bad node: n0",
        "run: give up: three attempts",
    ]
    (fields,) = [post["attachments"][0]["fields"] for post in posts if "n0" in post["text"]]
    assert {"title": "step", "value": "7", "short": True} in fields
    job.alerts.min_interval_s = 0.0
    alerts.send("bad_node", "n9")
    alerts.close()
    assert posts[-1]["text"] == "run: bad node: n9 (2 more of this kind since the last alert)"


def test_workers_reports_become_alerts(job, posts):
    job.alerts.min_interval_s = 0.0
    assert Alerts(job).find_problem() is None
    record_event(job.run, "save_failed", step=1, reason="of an earlier supervisor")
    alerts = Alerts(job)
    record_event(job.run, "checkpoint_removed", step=2)
    record_event(job.run, "save_failed", step=3, reason="No space left on device")
    alerts.follow()
    alerts.follow()
    alerts.close()
    assert [post["text"] for post in posts] == ["run: save failed: step 3: No space left on device"]


def test_a_command_gets_the_text(job, tmp_path):
    job.alerts.command = f"cat > {tmp_path}/mail"
    job.alerts.webhook_env = "NOT_SET_ANYWHERE"
    alerts = Alerts(job)
    assert "NOT_SET_ANYWHERE is not set" in str(alerts.find_problem())
    alerts.send("hang", "no rank finished a step")
    alerts.close()
    assert (tmp_path / "mail").read_text() == "run: hang: no rank finished a step"


def test_failures_are_events_without_the_url(job, posts, monkeypatch):
    job.alerts.command = "echo no mail here >&2; exit 3"
    alerts = Alerts(job)
    alerts.send("crash", "broken")
    monkeypatch.setenv("OUR_WEBHOOK", "no-scheme/a-secret")
    alerts.send("bad_node", "x")
    alerts.close()
    reasons = sorted(
        e["reason"] for e in read_lines(job.run / "events.jsonl") if e["kind"] == "alert_failed"
    )
    assert len(reasons) == 4
    assert reasons[0] == "command: OSError: exit status 3: no mail here"
    assert any("HTTP Error 500" in reason for reason in reasons)
    assert "a-secret" not in "".join(reasons)


def test_a_hanging_server_delays_nothing(job, posts, answer, monkeypatch):
    # Three crashes, then the supervisor gives up, while the first alert waits for its answer: it
    # comes only when the last alert is there.
    job.resilience.backoff_s = job.alerts.min_interval_s = 0.0
    job.alerts.timeout_s = 100.0
    monkeypatch.setattr("train.supervise.signals.StopSignals.install", lambda self: None)

    def no_start(*_):
        assert not answer.is_set()
        raise OSError("this will hang")

    monkeypatch.setattr("train.supervise.attempt.start_workers", no_start)
    assert Supervisor(job, Options(1), []).run() == 1
    assert {post["text"].split(":")[1] for post in posts} == {" crash", " give up"}
    assert answer.is_set()


def test_what_is_never_answered_ends_with_the_process(job):
    alerts, never = Alerts(job), threading.Event()
    job.alerts.timeout_s = 0.05
    alerts.threads = [threading.Thread(target=never.wait, daemon=True)]
    alerts.threads[0].start()
    alerts.close()
    assert alerts.threads[0].is_alive()
    never.set()
