"""Tests of local files: their order, caps, text, and the named reasons for no text."""

import bz2
import codecs
import glob
import gzip
import json
import os
import struct
import sys
from pathlib import Path

import fsspec
import pyarrow
import pytest

from data_mixtures.readers import local
from data_mixtures.readers.unpack import Unreadable
from data_mixtures.recipe import Input

TEXT, LINES = Input("text", ("x",)), Input("jsonl", ("x",))
ROWS = [
    {"text": "one", "id": 1},
    {"id": 2, "text": "zwei ü\n"},
    {"text": None},
    {"text": "", "body": "x"},
]
RAW = b"".join(b'{"text": "some words of line %d"}\n' % number for number in range(3000))
PACK = {
    "gz": gzip.compress,
    "zst": lambda raw: pyarrow.compress(raw, "zstd", asbytes=True),
    "bz2": bz2.compress,
}


def texts(source_input: Input, *paths, dropped: local.Dropped | None = None) -> list[str]:
    rows = local.documents(
        source_input, map(str, paths), local.Dropped() if dropped is None else dropped
    )
    return [text for text, *_ in rows]


def test_a_binary_file_gives_a_reason(tmp_path):
    (tmp_path / "file").write_bytes(b"a\0b")
    with pytest.raises(Unreadable, match="not_text"):
        local.read(tmp_path / "file")


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_a_text_that_is_too_large_is_counted_and_not_read(suffix, tmp_path, monkeypatch):
    # Arrow ends at 2 GiB with an error that names no file
    monkeypatch.setattr(local, "LARGEST_BYTES", 1000)
    large, fits = (tmp_path / f"{name}{suffix}" for name in ("large", "fits"))
    for path, raw in ((fits, b"x" * 1000), (large, b"x" * 1001)):
        path.write_bytes(PACK[suffix[1:]](raw) if suffix else raw)
    dropped = local.Dropped()
    assert texts(TEXT, large, fits, dropped=dropped) == ["x" * 1000]
    assert (dropped, dropped.files) == ({"too_large": 1}, {str(large)})


# a frame of zstd without content
SKIPPABLE = b"\x50\x2a\x4d\x18" + struct.pack("<I", 6) + b"abcdef"
# beside and between members or frames: what the stock tools read
BETWEEN = {"gz": b"\0" * 700, "zst": SKIPPABLE, "bz2": bz2.compress(b"")}


@pytest.mark.parametrize("suffix", PACK)
def test_what_is_packed_is_whole_or_damaged(suffix, tmp_path):
    pack = PACK[suffix]
    path = tmp_path / f"a.jsonl.{suffix}"
    # several members in a row, as `cat a.gz b.gz` makes them
    members = pack(RAW[:9000]) + pack(RAW[9000:])
    between = BETWEEN[suffix]
    stock = pack(b"") + pack(RAW[:9000]) + between + pack(RAW[9000:]) + between
    if suffix == "bz2":
        # bzip2's tools accept zeros only behind the last stream
        stock += b"\0" * 700
    reference = {"gz": gzip, "bz2": bz2}.get(suffix)
    assert reference is None or reference.decompress(stock) == RAW
    for whole in (pack(RAW), members, stock):
        path.write_bytes(whole)
        assert len(texts(LINES, path)) == 3000
    # a transfer that broke off in the middle
    cut = pack(RAW)[: len(pack(RAW)) // 2]
    for damaged in (cut, pack(RAW)[:-1], members[:-9], pack(RAW) + b"garbage", b"not packed", b""):
        path.write_bytes(damaged)
        with pytest.raises(local.DamagedFile) as error:
            texts(LINES, path)
        name, problem, rows = error.value.args
        assert name == str(path)
        assert (problem.reason, 0 <= rows <= 3000) == ("damaged", True)
        with pytest.raises(ValueError, match=rf"a\.jsonl\.{suffix} is damaged or truncated"):
            list(local.json_objects(path))


def test_a_window_that_is_too_long_says_how_to_unpack_the_file(tmp_path):
    # `zstd --long=31` of a stream asks for 2 GiB, which the tool itself refuses by default
    path = tmp_path / "a.jsonl.zst"
    # magic, a frame header with a window of 2 GiB (exponent 21 over 1 KiB), an empty last block
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + b"\x01\x00\x00")
    command = f"zstd -d --long=31 {path}"
    assert command in str(local.find_first_problem(str(path), "text"))
    with pytest.raises(local.DamagedFile) as error:
        texts(LINES, path)
    dropped = local.Dropped()
    dropped.add_file(str(path), error.value.args[1])
    assert dropped == {"long_window": 1}
    assert command in dropped.examples["long_window"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".bz2"])
def test_json_lines_end_at_newlines_alone(suffix, tmp_path):
    values = [
        {"text": f"a{mark}b", "n": n} for n, mark in enumerate("\u2028\u2029\x85\ufeff\x0b\x0c\x1c")
    ]
    lines = [json.dumps(value, ensure_ascii=False).encode() for value in values]
    # str.splitlines would end lines at each of these marks
    raw = codecs.BOM_UTF8 + b"\r\n\n".join(lines[:3]) + b"\n" + b"\n".join(lines[3:])
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix[1:]](raw) if suffix else raw)
    assert list(local.json_objects(path)) == list(zip([1, 3, 5, 6, 7, 8, 9], values, strict=True))
    assert texts(LINES, path) == [value["text"] for value in values]
    path.write_bytes(PACK[suffix[1:]](raw + b"\n{") if suffix else raw + b"\n{")
    with pytest.raises(ValueError, match=r"a\.jsonl.*:10: not JSON"):
        list(local.json_objects(path))
    skipped: dict[int, type[Exception]] = {}
    assert len(list(local.json_objects(path, skipped))) == 7
    assert skipped == {10: json.JSONDecodeError}


@pytest.mark.parametrize(
    ("line", "reason", "example"),
    [
        (b'{"text": "cut', "not_json", ""),
        (b'"\xff"', "not_utf8", ""),
        ('{"text": "日本"}'.encode("utf-16-le"), "not_utf8", ""),
        (b'{"text": "x", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not_json", ""),
        (
            b'{"content": "x", "id": 3}',
            "no_field",
            " has no 'text'; its fields: content, id. Set `field` of the input",
        ),
        (b'["x"]', "no_field", f" is a list, not an object: {local.NOT_LINES}"),
        (b'{"text": 3}', "no_field", " has 'text' of int, not text"),
    ],
)
def test_a_wrong_line_is_counted_with_its_place(line, reason, example, tmp_path):
    path = tmp_path / "a.jsonl"
    dropped = local.Dropped()
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good too"}\n')
    assert texts(LINES, path, dropped=dropped) == ["good", "good too"]
    assert dropped == {reason: 1}
    assert dropped.examples == {reason: f"{path}:2{example}"}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_file_of_another_encoding_gives_no_text_and_is_refused_at_the_start(encoding, tmp_path):
    # `json.loads` of bytes guesses per line: later lines then decode to other characters
    path = tmp_path / "a.jsonl"
    dropped = local.Dropped()
    path.write_bytes(('{"text": "日本語の文章です"}\n' * 40).encode(encoding))
    assert texts(LINES, path, dropped=dropped) == []
    assert (dropped, dropped.files) == ({"not_utf8": 1}, {str(path)})
    assert "is UTF-16 or UTF-32; convert it: iconv" in str(
        local.find_first_problem(str(path), "text")
    )


def test_pretty_printed_json_is_named(tmp_path):
    path = tmp_path / "a.json"
    for indent in (1, 4, "\t"):
        for rows, first in ((ROWS, "["), (ROWS[0], "{")):
            dropped = local.Dropped()
            path.write_text(json.dumps(rows, indent=indent))
            problem = local.find_first_problem(str(path), "text")
            assert problem == f"{path} begins with {first!r} alone on its line: {local.NOT_LINES}"
            texts(LINES, path, dropped=dropped)
            assert dropped.examples["not_json"] == f"{path}:1 ({local.NOT_LINES})"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").mkdir()
    for number in range(20):
        (tmp_path / f"a/{number}.txt").write_text(f"text {number} " * 20)
    return tmp_path


def names(roots, *paths: str, **options) -> list[str]:
    return [name for name, _, _ in local.find(Input("text", paths, **options), roots)]


def test_the_order_depends_on_names_below_a_root_alone_and_the_first_stay_the_first(
    folder, tmp_path
):
    chosen = Input("text", ("{corpus}/**/*.txt",), exclude=("*/3.txt",))
    roots = {"corpus": str(folder)}
    files = local.find(chosen, roots)
    names_in_order = [name for name, *_ in files]
    assert len(names_in_order) == 19
    assert names_in_order != sorted(names_in_order)
    status = Path(names_in_order[0]).stat()
    assert files[0] == [names_in_order[0], status.st_size, status.st_mtime_ns]
    every = names({}, f"{folder}/a/*")
    assert names({}, f"{folder}/a/*", files=5) == every[:5]
    assert names({}, f"{folder}/a/*", files=99) == every
    # a folder whose name reads as a pattern
    (tmp_path / "ot[h]er").mkdir()
    (folder / "a").rename(tmp_path / "ot[h]er/a")
    moved = {"corpus": str(tmp_path / "ot[h]er")}
    # the folder moved: names below the root, and so the order, are the same
    below = [local.portable(name, roots) for name in names_in_order]
    assert [local.portable(name, moved) for name, *_ in local.find(chosen, moved)] == below
    assert (
        local.portable(names_in_order[0], {"recipe": str(folder), **roots})
        == f"a/{Path(names_in_order[0]).name}"
    )
    roots = local.roots(tmp_path, tmp_path / "recipes")
    assert (roots["corpus"], roots["recipe"]) == (
        str(tmp_path / "corpus"),
        str(tmp_path / "recipes"),
    )
    assert names(roots, "{stdlib}/json/*.py")


def test_a_name_that_is_not_utf8_can_be_excluded(folder):
    Path(os.fsdecode(os.fsencode(folder / "a") + b"/na\xffme.txt")).write_text("x")
    with pytest.raises(ValueError, match="is not UTF-8; rename it, or exclude it"):
        names({}, f"{folder}/a/*")
    assert len(names({}, f"{folder}/a/*", exclude=("*/na?me.txt",))) == 20


def test_a_file_of_the_very_name_is_meant_before_a_pattern(folder, monkeypatch):
    for name in ("br[ack]et.txt", "bra.txt", "what?.txt", "star*.txt", "stars.txt"):
        (folder / name).write_text("x")
    roots = {"recipe": str(folder)}
    for name in ("br[ack]et.txt", "what?.txt", "star*.txt"):
        for path in (name, f"{folder}/{name}", f"{{recipe}}/{name}", f"file://{folder}/{name}"):
            assert [Path(each).name for each in names(roots, path)] == [name]
        assert glob.glob(local.pattern_of(f"{folder}/{name}")) == [f"{folder}/{name}"]
        assert f"{folder}/{name}" not in names(roots, "*.txt", exclude=(name,))
    assert names(roots, "br[a]*.txt") == [f"{folder}/bra.txt"]
    monkeypatch.setenv("HOME", str(folder))
    assert names(roots, "~/star*.txt") == [f"{folder}/star*.txt"]
    with pytest.raises(
        ValueError, match=r"no file matches .*/a \(a folder; give its files, such as .*/a/\*\*/\*"
    ):
        names(roots, "a")


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("text", "a.jsonl", "is jsonl, its input has kind = 'text'"),
        ("text", "A.JSONL.zst", "is jsonl, its input has kind = 'text'"),
        ("text", "a.csv", "is not read; convert it"),
        ("text", "s3://b/a.jsonl?versionId=3", "is jsonl"),
        ("jsonl", "a.parquet", "is parquet, its input has kind = 'jsonl'"),
        ("parquet", "a.parquet.gz", "is not read; convert it"),
    ],
)
def test_a_suffix_of_another_kind_is_refused(kind, name, message):
    with pytest.raises(ValueError, match=message):
        local.check_kind(Input(kind, ("x",)), [["good", 1, 1], [name, 1, 1]])


def test_documents_are_capped_and_cleaned_and_the_rest_is_counted(folder):
    (folder / "a/0.txt").write_bytes(b"\xff")
    (folder / "a/1.txt").write_text("   ")
    (folder / "b.jsonl").write_text('{"body": "one\\ud800 two"}\n{"body": null}\n')
    paths = sorted((folder / "a").iterdir())
    dropped = local.Dropped()
    passages = texts(TEXT, *paths, dropped=dropped)
    assert passages == [path.read_text() for path in paths[2:]]
    assert dropped == {"not_utf8": 1, "no_text": 1}
    assert dropped.examples["not_utf8"] == str(folder / "a/0.txt")
    # the cap ends before the document that would exceed it
    capped = texts(Input("text", ("x",), max_bytes=1000), *paths)
    assert capped == passages[: len(capped)]
    assert sum(map(len, capped)) <= 1000 < sum(map(len, passages[: len(capped) + 1]))
    dropped.clear()
    assert texts(Input("jsonl", ("x",), field="body"), folder / "b.jsonl", dropped=dropped) == [
        "one two"
    ]
    assert (dropped, dropped.surrogates) == ({"no_text": 1}, 1)


def test_urls_are_listed_read_and_checked(tmp_path):
    store = fsspec.filesystem("memory")
    store.pipe({"/own/a.jsonl.gz": gzip.compress(RAW), "/own/b.jsonl.gz": gzip.compress(RAW[:300])})
    chosen = Input("jsonl", ("memory://own/*.jsonl.gz",))
    files = local.find(chosen, local.roots(tmp_path, tmp_path))
    assert sorted(name for name, _, _ in files) == [
        f"memory:///own/{name}.jsonl.gz" for name in "ab"
    ]
    assert len(texts(chosen, *(name for name, _, _ in files))) > 3000
    local.check_unchanged(files)
    store.pipe("/own/a.jsonl.gz", gzip.compress(RAW * 2))
    with pytest.raises(
        ValueError, match=r"a\.jsonl\.gz has changed since .* \([\d,]+ bytes then, [\d,]+ now"
    ):
        local.check_unchanged(files)
    store.rm("/own", recursive=True)
    with pytest.raises(
        ValueError, match=r"(a|b)\.jsonl\.gz is planned and no longer there; start again"
    ):
        local.check_unchanged(files)
    with pytest.raises(ValueError, match=r"no file matches memory://own/"):
        local.find(chosen, {})
    path = tmp_path / "a.txt"
    path.write_text("here")
    for name in (str(path), f"file://{path}"):
        files = local.find(Input("text", (name,)), {})
        # the same size, another time
        os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))
        with pytest.raises(
            ValueError, match=r"a\.txt has changed since .* \(same size, other time or tag"
        ):
            local.check_unchanged(files)


def test_a_missing_package_or_protocol_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for url, message in (
        (
            "gs://b/*",
            r"gs://b/\* needs a package that is missing .*pip install 'laneformer\[gcs\]'",
        ),
        (
            "nowhere://b/*",
            r"nowhere://b/\* cannot be read: ValueError: Protocol not known: nowhere",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            names({}, url)
