"""evals.jsonl: one JSON object an evaluation, append-only, with what is needed to trust or repeat the figures.

A record is one line written by one call and flushed to disk, so that evaluations running side by side cannot mix their
lines, and a line that was cut by a crash spoils only itself.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from records.files import append_line, code_version

PROVENANCE = (
    "kind", "step", "tokens_total", "phase", "time", "seconds", "code_version", "tokenizer_sha256", "data_sha256",
)  # fmt: skip


@dataclass(frozen=True)
class About:
    """The options that every evaluation of a checkpoint has: where its record goes, and what it is about."""

    out: Path | None = None
    """file to append the record to, such as runs/demo/evals.jsonl"""
    step: int | None = None
    """training step of the checkpoint, for the record"""
    tokens_total: int | None = None
    """tokens that the checkpoint has seen, for the record"""
    phase: str | None = None
    """phase of the checkpoint, for the record"""

    def append(self, kind: str, figures: dict[str, Any], **provenance: Any) -> dict[str, Any]:
        """`append_record` with these."""
        return append_record(
            self.out, kind, figures, step=self.step, tokens_total=self.tokens_total, phase=self.phase, **provenance
        )


NOWHERE = About()
AboutFlags = Annotated[About, tyro.conf.OmitArgPrefixes]  # --out, --step, ... as flags of the command itself


def append_record(
    path: Path | None,
    kind: str,
    figures: dict[str, Any],
    *,
    seconds: float,
    tokenizer_sha256: str | None,
    data_sha256: str | None,
    step: int | None = None,
    tokens_total: int | None = None,
    phase: str | None = None,
) -> dict[str, Any]:
    """Append an evaluation to `path` (None: to no file) and return the record.

    figures: the kind's own results, which may not reuse a provenance name (ValueError). seconds: wall time of the
    evaluation. step, tokens_total, phase: the checkpoint that was evaluated, None where it is not known.
    NaN and infinity are refused (ValueError): a figure that could not be measured is left out or null.
    """
    taken = sorted(set(figures) & set(PROVENANCE))
    if taken:
        raise ValueError(f"figures of {kind!r} use the provenance names {taken}; rename these figures")
    values = (kind, step, tokens_total, phase, time.time(), round(seconds, 3), code_version(Path(__file__).parent))
    record = dict(zip(PROVENANCE, (*values, tokenizer_sha256, data_sha256), strict=True)) | figures
    try:
        line = json.dumps(record, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"the record of {kind!r} holds NaN or infinity, which JSON has no word for: {record}"
        ) from error
    if path is not None:
        append_line(path, line)
    return record
