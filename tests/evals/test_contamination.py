"""Tests of the contamination report from manifests of real and made-up sources."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_mixtures.shards import write_manifest, write_windows
from data_mixtures.stages.decontaminate import make_index
from evals.contamination import contamination, main
from records.evals import About
from tests.records.test_fields import check as check_fields


def source(data: Path, name: str, hits: dict, tokenizer: str = "ab"):
    folder = data / name
    folder.mkdir(parents=True, exist_ok=True)
    valid = write_windows(folder / "valid.bin", np.arange(5, dtype=np.uint16), 4)
    manifest = {"contamination": hits, "tokenizer_sha256": tokenizer, "shards": [], "valid": valid}
    write_manifest(folder, manifest)


@pytest.fixture
def data(tmp_path):
    """Write two sources, and an index of two benchmarks, one without hits."""
    sentence = "the quick brown fox number {} jumps over the lazy dog and then it sleeps well"
    for name, count in (("quiz", 4), ("other", 2)):
        rows = [json.dumps({"question": sentence.format(f"{name} {i}")}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join([*rows, '{"question": "too short"}']) + "\n"
        )
    out = tmp_path / "data"
    source(out, "web", {"quiz": {"documents": 7, "items": 3}})
    # 3 + 3 hits on 5 items: some were found in both sources
    source(out, "code", {"quiz": {"documents": 1, "items": 3}})
    make_index({name: str(tmp_path / f"{name}.jsonl") for name in ("quiz", "other")}, out)
    return out


def test_counts_add_up_and_never_pass_the_items(data, capsys):
    out = data / "evals.jsonl"
    record = main(data, About(out, phase="phase1"))
    assert record == json.loads(out.read_text())
    check_fields(record, None)
    quiz = record["benchmarks"]["quiz"]
    other = record["benchmarks"]["other"]
    assert (quiz["items"], quiz["searchable"], quiz["touched"], quiz["documents_dropped"]) == (
        5,
        4,
        5,
        8,
    )
    assert (other["items"], other["touched"], other["documents_dropped"], other["sources"]) == (
        3,
        0,
        0,
        {},
    )
    assert (record["kind"], record["phase"], record["tokenizer_sha256"]) == (
        "contamination",
        "phase1",
        "ab",
    )
    assert set(record["manifests"]) == {"code", "web"}
    assert "code, web" in capsys.readouterr().err
    before = contamination(data)["manifests"]
    # the hidden folder that a killed publication leaves
    shutil.copytree(data / "web", data / ".web.old")
    assert contamination(data)["manifests"] == before
    source(data, "web", {}, tokenizer="cd")
    # other data, another hash
    assert contamination(data)["manifests"]["web"] != before["web"]


def test_a_reader_of_the_record_may_leave(data):
    # as `head` does
    command = [sys.executable, "-m", "evals.contamination", "--data", str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE


def test_data_that_were_not_searched_say_so(data_folder, tmp_path, capsys):
    assert main(data_folder)["benchmarks"] == {}
    assert "nothing was searched for" in capsys.readouterr().err
    with pytest.raises(ValueError, match="holds no <source>"):
        main(tmp_path)
