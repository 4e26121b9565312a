"""Lines that survive a crash, files that appear whole, and one hash of a model folder."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from records.files import (
    append_line,
    append_or_keep,
    model_sha256,
    read_lines,
    replace_last_line,
    write_atomically,
)

DECISIVE = [
    "config.json",
    "tokenizer.json",
    "model.safetensors",
    "chat_template.jinja",
    "x.model",
    "merges.txt",
]


def test_a_cut_line_costs_only_itself(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert read_lines(path) == []
    path.write_text('{"a": 1}\n\n{"a": 2, "b"')
    unreadable: list[int] = []
    assert read_lines(path, unreadable) == [{"a": 1}]
    # the last line may be half written
    assert unreadable == []
    append_line(path, '{"a": 3}')
    append_line(path, "[4]")
    assert read_lines(path, unreadable) == [{"a": 1}, {"a": 3}]
    assert unreadable == [3, 5]


def test_lines_of_many_processes_are_all_there(tmp_path):
    # Every rank of a job that crashes appends its event at about the same time.
    path = tmp_path / "lines.jsonl"
    count = 200
    program = f"""
import pathlib, sys
from records.files import append_line
for n in range({count}):
    append_line(pathlib.Path(sys.argv[1]), '{{"rank": ' + sys.argv[2] + ', "n": ' + str(n) + '}}')
"""
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(path), str(rank)]) for rank in range(4)
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    unreadable: list[int] = []
    lines = read_lines(path, unreadable)
    assert not unreadable
    assert sorted((line["rank"], line["n"]) for line in lines) == [
        (r, n) for r in range(4) for n in range(count)
    ]


def test_not_a_number_is_none_and_odd_bytes_are_no_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": NaN, "b": [-Infinity]}\r\n\xff\n{"c": "\xe2\x80\xa8"}\n')
    assert read_lines(path) == [{"a": None, "b": [None]}, {"c": "\u2028"}]


def test_the_last_line_is_replaced_whole(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_line(path, '{"step": 1}')
    append_line(path, '{"step": 2}')
    replace_last_line(path, '{"step": 2}', '{"step": 2, "é": 3}')
    assert path.read_text() == '{"step": 1}\n{"step": 2, "é": 3}\n'
    with pytest.raises(AssertionError):
        replace_last_line(path, '{"step": 1}', "{}")


@pytest.mark.parametrize(("content", "stored"), [("é\n", "é\n".encode()), (b"\xff", b"\xff")])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, content, stored):
    path = tmp_path / "file"
    path.write_text("before")
    write_atomically(path, content)
    assert path.read_bytes() == stored
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_bytes() == stored
    assert list(tmp_path.iterdir()) == [path]


def test_the_hash_of_a_model_is_of_what_decides_its_answers(tmp_path):
    for name in DECISIVE:
        (tmp_path / name).write_text(name)
    before = model_sha256(tmp_path)
    for name in ("README.md", "model.py"):
        (tmp_path / name).write_text(name)
    assert model_sha256(tmp_path) == before
    for name in DECISIVE:
        (tmp_path / name).write_text("changed")
        assert model_sha256(tmp_path) != before, name
        (tmp_path / name).write_text(name)
    (tmp_path / "config.json").rename(tmp_path / "configs.json")
    # names count
    assert model_sha256(tmp_path) != before


def test_lines_wait_in_memory_until_there_is_room(tmp_path, caplog):
    # The kernel writes ten bytes and no more, as on a full disk: no half line, nothing lost, the
    # order is kept.
    path = tmp_path / "rows.jsonl"
    assert append_or_keep(path, "first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # files of at most 10 bytes: writes beyond it are cut, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        assert not append_or_keep(path, "second, which is longer")
        assert not append_or_keep(path, "3")
        replace_last_line(path, "3", "third, with its validation")
        assert path.read_text() == "first\n"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "rows.jsonl cannot be written" in caplog.text
    assert "GB free)" in caplog.text
    assert append_or_keep(path, "fourth")
    lines = ["first", "second, which is longer", "third, with its validation", "fourth"]
    assert path.read_text().splitlines() == lines
