"""Tests of the latency benchmark: prediction on known times, report, command."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from laneformer.engine import bench
from tools.bench import latency
from tools.bench.__main__ import main
from tools.bench.latency import VARIANTS, config_of, predict
from tools.roofline import token_s

# 15 layers of 10 us, in tokens of 1,000 us
MODULES_S = (4e-6, 6e-6)


def test_the_prediction_adds_what_no_variant_hides():
    for name, link_us, exchanges in (
        ("tensor parallel", 100, 31),
        # the last sum, and the token
        ("Ladder", 4, 2),
        # one early layer
        ("delay 1", 10, 3),
        # four of them
        ("delay 4", 40, 9),
        ("delay 2, no early sums", 20, 1),
    ):
        config = config_of("small", name)
        alone, behind = predict(name, config, MODULES_S, [0.0, link_us], 1000.0)
        assert alone == pytest.approx(1000)
        assert behind == pytest.approx(1e6 / (1000 + exchanges * link_us)), name


def test_other_tokens_behind_a_link_end_the_run(monkeypatch):
    answers = iter([[1, 2, 4], [1, 2, 3]])
    timed = SimpleNamespace(token_s=[1e-3])
    monkeypatch.setattr(
        bench, "run_timed", lambda *_: SimpleNamespace(whole=timed, tokens=next(answers))
    )
    decoder = SimpleNamespace(set_latency=lambda link_s: True)
    engine: Any = SimpleNamespace(_open=lambda: decoder, config=SimpleNamespace(vocab_size=9))
    with pytest.raises(RuntimeError, match="other tokens behind a link of 10 us"):
        bench.link_speeds(engine, (0.0, 10.0))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--rounds", "0"], "latency: --rounds 0: it should be greater than or equal to 1"),
        (["--link-us", "1", "nan"], "latency: --link-us nan: it should be a finite number"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(arguments, error, capsys):
    with pytest.raises(SystemExit):
        main(["latency", *arguments])
    assert re.search(error, capsys.readouterr().err)


@pytest.mark.rotate
def test_the_command_measures_every_variant(tmp_path, capsys):
    page = tmp_path / "page.md"
    main(["latency", "--model", "tiny", "--link-us", "3000", "--rounds", "1", "--out", str(page)])
    (model,) = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    assert model["tokens_per_s"].keys() == model["predicted"].keys() == VARIANTS.keys()
    for name, (alone, behind) in model["tokens_per_s"].items():
        # no token is faster than what its joins must wait for
        floor_s = token_s(
            config_of("tiny", name), (0.0, 0.0), 3e-3, modules_late=int(name == "Ladder")
        )
        assert behind <= 1 / floor_s
        assert model["predicted"][name][0] == pytest.approx(alone)
    assert page.read_text().startswith(latency.FILE_START)
    assert all(f"| {name} |" in page.read_text() for name in VARIANTS)
