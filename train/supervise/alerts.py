"""Alert people: call a webhook and run a command when somebody should look at the run."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from records.events import record_event
from records.files import host_name, read_lines
from records.job import JobSections

# events of workers that are worth an alert
OF_WORKERS = ("bad_step", "save_failed", "disk_full", "kernels_replaced")


class Alerts:
    """The alerts of one run; the same kind at most once in `alerts.min_interval_s`."""

    def __init__(self, job: JobSections):
        self.run, self.section = job.run, job.alerts
        self.sent_s: dict[str, float] = {}
        self.dropped: dict[str, int] = {}
        self.threads: list[threading.Thread] = []
        self.events = self.run / "events.jsonl"
        # lines read so far: those of earlier supervisors are no news
        self.read_count = len(read_lines(self.events))

    def find_problem(self) -> str | None:
        """Say why the webhook cannot work; None if it can."""
        name = self.section.webhook_env
        return (
            None
            if not name or os.environ.get(name)
            else f"alerts.webhook_env: {name} is not set in the environment"
        )

    def follow(self) -> None:
        """Send what the workers have reported since the last call."""
        events = read_lines(self.events)
        new, self.read_count = events[self.read_count :], len(events)
        for event in new:
            if event.get("kind") in OF_WORKERS:
                step, reason = event.get("step"), event.get("reason")
                text = f"step {step}: {reason}" if step is not None else str(reason)
                self.send(event["kind"], text, step=step)

    def send(self, kind: str, text: str, **facts: Any) -> None:
        """Deliver in the background, unless this kind was sent lately."""
        now_s, every_s = time.monotonic(), self.section.min_interval_s
        if now_s - self.sent_s.get(kind, -every_s) < every_s:
            self.dropped[kind] = self.dropped.get(kind, 0) + 1
            return
        # at the start of the delivery: one that fails counts as well, or a broken server would be called all the time
        self.sent_s[kind] = now_s
        more = (
            f" ({n} more of this kind since the last alert)"
            if (n := self.dropped.pop(kind, 0))
            else ""
        )
        text = f"{self.run.name}: {kind.replace('_', ' ')}: {text}{more}"
        fields = {"run": str(self.run), "kind": kind, "host": host_name(), **facts}
        if url := os.environ.get(self.section.webhook_env or "", ""):
            self._begin("webhook", lambda: self._post(url, text, fields), url)
        if self.section.command:
            self._begin("command", lambda: self._command(text))

    def close(self) -> None:
        """Give alerts under way their time."""
        deadline_s = time.monotonic() + self.section.timeout_s
        for thread in self.threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _begin(self, way: str, deliver: Callable[[], object], secret: str = "") -> None:
        def attempt() -> None:
            try:
                deliver()
            except Exception as problem:
                # whatever a server or a URL can do, the job goes on; a webhook's URL is a secret
                reason = f"{way}: {type(problem).__name__}: {problem}"
                record_event(
                    self.run,
                    "alert_failed",
                    reason=reason.replace(secret, "URL") if secret else reason,
                )

        # nothing waits for a server that does not answer but the very end, and that for `alerts.timeout_s` at most
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        self.threads.append(threading.Thread(target=attempt, daemon=True, name=f"alert-{way}"))
        self.threads[-1].start()

    def _post(self, url: str, text: str, fields: dict[str, Any]) -> None:
        """Post JSON as Slack and Mattermost take it."""
        rows = [
            {"title": name, "value": str(value), "short": True}
            for name, value in fields.items()
            if value is not None
        ]
        body = json.dumps(
            {"text": text, "attachments": [{"fallback": text, "fields": rows}]}
        ).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.section.timeout_s):
            pass

    def _command(self, text: str) -> None:
        command = ["bash", "-c", self.section.command]
        process = subprocess.run(
            command, input=text, text=True, capture_output=True, timeout=self.section.timeout_s
        )
        if process.returncode:
            raise OSError(f"exit status {process.returncode}: {process.stderr.strip()[-200:]}")
