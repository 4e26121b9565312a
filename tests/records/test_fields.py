"""Every evaluation's record has the fields that are written down, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evals.core.__main__
import evals.samples
from evals.core.evaluate import Settings
from evals.scorer import Answerer
from records.evals import FIELDS, NO_MODEL, PROVENANCE
from records.files import model_sha256
from tests.evals.core.core_assets import write_bundle, write_laneformer

CPU = Answerer(device="cpu")


def check(record: dict[str, Any], folder: Path | None) -> None:
    kind = record["kind"]
    fields = [name for names in FIELDS[kind] for name in names.split()]
    top = {name for name in fields if "/" not in name}
    assert set(record) - {"not_core"} == {*PROVENANCE, *top}, kind
    for outer in {name.split("/")[0] for name in fields if "/" in name}:
        inner = {name.split("/")[1] for name in fields if name.startswith(f"{outer}/")}
        assert all(set(entry) == inner for entry in record[outer].values()), (kind, outer)
    if folder is not None:
        expected = (model_sha256(folder), "engine", "cpu", "fp32")
        assert (
            tuple(record[name] for name in ("model_sha256", "backend", "device", "dtype"))
            == expected
        )


def test_records_have_the_fields_that_are_written_down(tmp_path):
    model = tmp_path / "hf"
    write_laneformer(model)
    write_bundle(tmp_path / "bundle", ["copa", "coqa"])
    check(evals.core.__main__.main(model, tmp_path / "bundle", Settings(limit=2), CPU), model)
    check(
        evals.samples.main(
            model, max_new_tokens=2, answerer=Answerer(device="cpu", max_length=256)
        ),
        model,
    )
    assert {*NO_MODEL} <= {*PROVENANCE}
