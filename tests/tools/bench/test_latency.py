"""The latency benchmark: its prediction on known times, its report, and the command on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tools.bench import latency
from tools.bench.__main__ import main
from tools.bench.latency import HALF, VARIANTS, Options, fitted, predicted_share, sweep

MODULES_S = (4e-6, 6e-6)


def rows_of(shape: str, speed: float = 1000.0) -> latency.Result:
    rows = [{"variant": name, "link_us": 0.0, "tokens_per_s": speed} for name in VARIANTS]
    return {"model": shape, "module_s": MODULES_S, "rows": rows}


def test_the_prediction_adds_what_no_variant_hides():
    model = rows_of("small")  # 15 layers of 10 us in tokens of 1,000 us
    assert predicted_share(model, "tensor parallel", 100) == pytest.approx(1000 / (1000 + 31 * 100))
    assert predicted_share(model, "Ladder", 4) == pytest.approx(
        1000 / (1000 + 2 * 4)
    )  # the last sum, and the token
    assert predicted_share(model, "delay 1", 10) == pytest.approx(1000 / (1000 + 3 * 10))  # one early layer
    assert predicted_share(model, "delay 4", 40) == pytest.approx(1000 / (1000 + 9 * 40))  # four of them
    assert predicted_share(model, "delay 2, no early sums", 20) == pytest.approx(1000 / (1000 + 20))


def test_the_fit_finds_the_time_of_a_layer_that_the_speeds_were_made_with():
    """Three quarters of what the model says: seen from the speeds alone, links on both sides of the knees."""
    model = rows_of("small")
    links = [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 20.0, 30.0, 40.0]
    model["rows"] = [
        {"variant": name, "link_us": link, "tokens_per_s": 1000 * share, "of_no_latency": share}
        for name in VARIANTS
        for link in links
        if (share := predicted_share({**model, "rows": rows_of("small")["rows"]}, name, link, 0.75))
    ]
    for name in ("Ladder", "delay 1", "delay 2", "delay 2, no early sums"):
        assert fitted(model, name) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("name", "knee_us"), [("tensor parallel", 0), ("Ladder", 4), ("delay 1", 10), ("delay 4", 40)]
)
def test_a_knee_is_where_joins_begin_to_wait(name, knee_us):
    knee_s = VARIANTS[name].knee_s(MODULES_S)
    assert knee_s == pytest.approx(knee_us * 1e-6)
    config = VARIANTS[name].config("small", use_early_comm=False)
    steps = [VARIANTS[name].token_s(config, MODULES_S, knee_s + extra) for extra in (0.0, 1e-7)]
    slope = (steps[1] - steps[0]) / 1e-7
    assert slope > 2  # beyond the token's own exchange, and Ladder's last sum
    if knee_s:
        assert VARIANTS[name].token_s(config, MODULES_S, knee_s) < 150e-6 + 2.01 * knee_s


def test_other_tokens_at_a_latency_end_the_run(monkeypatch):
    monkeypatch.setattr(latency, "trial", lambda engine, link_s, *_: (1e-3, [1, 2, 3 if link_s else 4]))
    options = Options(link_us=(0, 10), rounds=1)

    class Fake:
        config = VARIANTS["delay 2"].config("tiny")

    engines: dict[str, Any] = {"delay 2": Fake(), HALF: Fake()}
    with pytest.raises(RuntimeError, match="delay 2: other tokens at a latency of 10 us"):
        sweep(engines, options, Console(quiet=True))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--model", "7b"], r"model = \['7b'\] is unknown; choose from 300m, small, tiny"),
        (["--link-us", "1", "3"], "must hold 0"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(arguments, error, capsys):
    with pytest.raises(SystemExit):
        main(["latency", *arguments])
    assert re.search(error, capsys.readouterr().err)


@pytest.mark.rotate
def test_the_command_measures_resumes_and_draws(tmp_path: Path, capsys):
    kept, plot = tmp_path / "kept.jsonl", tmp_path / "plot.svg"
    arguments = ["--model", "tiny", "--link-us", "0", "3000", "--rounds", "1", "--trial-s", "0.02"]
    arguments += ["--kept", str(kept), "--plot", str(plot)]
    main(["latency", *arguments, "--out", str(tmp_path / "page.md")])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {(row["variant"], row["link_us"]): row for row in result["models"][0]["rows"]}
    assert rows.keys() == {(name, link) for name in VARIANTS for link in (0, 3000)}
    for name, variant in VARIANTS.items():  # no token is faster than what its joins must wait for
        floor_s = variant.token_s(variant.config("tiny"), (0.0, 0.0), 3e-3)
        assert rows[name, 3000]["high"] <= 1 / floor_s
        assert rows[name, 0]["predicted"] == pytest.approx(rows[name, 0]["tokens_per_s"])
    page, picture = (tmp_path / "page.md").read_text(), plot.read_bytes()
    assert "tools/roofline.py" in page
    assert all(f"| {name} |" in page for name in VARIANTS)
    assert "tensor parallel" in picture.decode()

    main(["latency", *arguments, "--json"])  # nothing is measured twice, and the drawing is the same
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["models"] == result["models"]
    assert plot.read_bytes() == picture
