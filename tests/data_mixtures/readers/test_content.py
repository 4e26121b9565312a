"""Tests of contents by sha1: one request each, retries of failures, kept through kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_mixtures import shards
from data_mixtures.readers import content
from data_mixtures.recipe import Input
from tests.data_mixtures.conftest import prepare_folder
from tests.data_mixtures.readers.fake_bucket import FakeBucket, sha1

CONTENTS = [f"def f{i}():\n    return {i}  # grüße\n".encode() * (i % 5 + 1) for i in range(300)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(content, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(content, "PART_CONTENTS", 40)


def write_resolved(path: Path, contents: list[bytes], **more: Any) -> str:
    columns = {
        "repo": [f"a/{i}" for i in range(len(contents))],
        "sha1": [sha1(data) for data in contents],
    }
    pq.write_table(pa.table({**columns, **more}), path, row_group_size=50)
    return str(path)


def fetch_contents(
    folder: Path, url: str, groups=None, share=0.0
) -> tuple[dict[str, Any], list[dict]]:
    """Fetch row groups of resolved.parquet; return counts and rows."""
    settings = Input("resolved", ("resolved.parquet",), content_url=url, max_missing_share=share)
    path = str(folder / "resolved.parquet")
    raw = folder / "raw.parquet"
    groups = groups or list(range(pq.read_metadata(path).num_row_groups))
    counts = content.fetch(path, "resolved", groups, settings, raw, folder / "parts")
    return counts, pq.read_table(raw).to_pylist()


def test_each_content_once_in_order_with_its_origin_through_failures(tmp_path, capsys):
    write_resolved(tmp_path / "resolved.parquet", [*CONTENTS, *CONTENTS[:20]])
    with FakeBucket(CONTENTS) as bucket:
        three, four, five = map(sha1, CONTENTS[3:6])
        # answers before the object itself; five gets it uncompressed
        bucket.flaws = {three: [503, 429, 500], four: [b"damaged"], five: [CONTENTS[5]]}
        counts, rows = fetch_contents(tmp_path, bucket.url)
        assert bucket.requests == {**{sha1(data): 1 for data in CONTENTS}, three: 4, four: 2}
    assert "/parts: 40 of 300 contents, 0 missing" in capsys.readouterr().err.splitlines()[0]
    assert [row["text"] for row in rows] == CONTENTS
    assert json.loads(rows[299]["origin"]) == {"file": "resolved", "row": 299, "repo": "a/299"}
    size = sum(map(len, CONTENTS))
    assert counts == {"documents": 300, "bytes": size, "dropped": {"same_content": 20}}


def test_a_unit_is_whole_row_groups_and_sha1_may_be_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "UNIT_ROWS", 100)
    names = pa.array([bytes.fromhex(sha1(data)) for data in CONTENTS], pa.binary(20))
    write_resolved(tmp_path / "resolved.parquet", CONTENTS, sha1=names)
    with FakeBucket(CONTENTS) as bucket:
        _, rows = fetch_contents(
            tmp_path, bucket.url, groups=content.units(str(tmp_path / "resolved.parquet"))[1]
        )
    assert [row["text"] for row in rows] == CONTENTS[100:200]


def test_a_bucket_that_does_not_answer_ends_the_unit_and_keeps_what_came(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "CONNECTIONS", 4)
    monkeypatch.setattr(content, "ATTEMPTS", 2)
    write_resolved(tmp_path / "resolved.parquet", CONTENTS)
    with FakeBucket(CONTENTS, slow_s=0.002) as bucket:
        system = content._Bucket.content

        def content_then_down(self, name):
            bucket.down = sum(bucket.requests.values()) > 150
            return system(self, name)

        monkeypatch.setattr(content._Bucket, "content", content_then_down)
        with pytest.raises(ValueError, match=r"does not answer \(.*http_503.* contents in a row"):
            fetch_contents(tmp_path, bucket.url)
        # the bucket goes down after 150 requests; what had come by then is saved
        saved = sum(part.metadata.num_rows for part in content._parts(tmp_path / "parts"))
        assert 100 < saved < 200
        monkeypatch.setattr(content._Bucket, "content", system)
        bucket.down = False
        bucket.requests.clear()
        _, rows = fetch_contents(tmp_path, bucket.url)
        assert bucket.requests.total() == 300 - saved
    assert len(rows) == 300


RECIPE = """
seq_len = 32
windows_per_shard = 40
valid_per_10000 = 0
tokenizer = {{ vocab_size = 300, train_bytes = 60_000 }}
[sources.code]
inputs = [{{ kind = "resolved", paths = ["*.parquet"], content_url = "{url}", max_missing_share = 0.05 }}]
[phase1]
code = 1
"""


def test_contents_become_shards_and_missing_ones_stop_the_unit_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "UNIT_ROWS", 100)
    contents = [*CONTENTS[:250], b"gr\xfc\xdfe " * 20]
    out = tmp_path / "out"
    write_resolved(tmp_path / "resolved.parquet", contents)
    with FakeBucket(contents[:100] + contents[110:]) as bucket:
        (tmp_path / "code.toml").write_text(RECIPE.format(url=bucket.url))
        missing = r"fetch code/unit-00001: 10 of 100 contents \(10.00%\) are missing"
        with pytest.raises(ValueError, match=missing):
            prepare_folder(tmp_path / "code.toml", out)
        assert list((out / "fetch/code").glob(".unit-*")) == [out / "fetch/code/.unit-00001.parts"]
        # = FakeBucket|three are still missing, within max_missing_share
        bucket.objects |= FakeBucket(contents[100:107]).objects
        bucket.requests.clear()
        prepare_folder(tmp_path / "code.toml", out)
        assert set(bucket.requests) == {
            sha1(data) for data in (*contents[100:110], *contents[200:])
        }
        # another time is another plan, and not a reason to ask again
        (tmp_path / "resolved.parquet").touch()
        bucket.requests.clear()
        assert "fetch         3 units done" in prepare_folder(tmp_path / "code.toml", out)
        assert set(bucket.requests) == {sha1(data) for data in contents[107:110]}
    assert not list((out / "fetch/code").glob(".unit-*"))
    manifest = shards.read_manifest(out / "code")
    assert (manifest["read"], manifest["kept"]) == (251, 247 - manifest["dropped"]["too_short"])
    assert {"not_found": 3, "not_utf8": 1}.items() <= manifest["dropped"].items()


def test_a_resolved_file_without_sha1_is_named(tmp_path):
    pq.write_table(pa.table({"repo": ["a"]}), tmp_path / "resolved.parquet")
    (tmp_path / "code.toml").write_text(RECIPE.format(url="http://127.0.0.1:9/{sha1}"))
    with pytest.raises(
        ValueError, match=r"resolved.parquet needs one column sha1 .*; its columns: repo"
    ):
        prepare_folder(tmp_path / "code.toml", tmp_path / "out")
