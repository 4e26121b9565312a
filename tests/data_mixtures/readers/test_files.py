"""Local inputs: which files in which order, caps, and what is counted as dropped."""

from collections import Counter

import pytest

from data_mixtures.readers import files
from data_mixtures.recipe import Input


@pytest.fixture
def folder(tmp_path):
    for number in range(20):
        (tmp_path / f"a/{number}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / f"a/{number}.txt").write_text(f"text {number} " * 20)
    return tmp_path


def test_the_order_depends_on_names_below_a_root_alone(folder, tmp_path):
    chosen = Input("text", ("{corpus}/**/*.txt",), exclude=("*/3.txt",))
    found = files.find(chosen, {"corpus": str(folder)})
    assert len(found) == 19
    assert found != sorted(found)
    (tmp_path / "other").mkdir()
    (folder / "a").rename(tmp_path / "other/a")
    moved = files.find(chosen, {"corpus": str(tmp_path / "other")})
    assert [path.name for path in moved] == [path.name for path in found]
    assert files.portable(str(moved[0]), {"corpus": str(tmp_path / "other")}) == f"corpus/a/{moved[0].name}"
    roots = files.roots(tmp_path)
    assert roots["corpus"] == str(tmp_path / "corpus")
    assert files.find(Input("text", ("{stdlib}/json/*.py",)), roots)


def test_documents_are_cut_capped_and_cleaned_and_the_rest_is_counted(folder):
    (folder / "a/0.txt").write_bytes(b"\xff")
    (folder / "a/1.txt").write_text("   ")
    (folder / "b.jsonl").write_text('{"body": "one\\ud800 two\\u0000"}\n{"body": null}\n')
    paths = sorted((folder / "a").iterdir())
    dropped = Counter[str]()
    found = list(files.documents(Input("text", ("x",)), paths, 100, dropped))
    assert "".join(found) == "".join(path.read_text() for path in paths[2:])
    assert max(map(len, found)) == 100
    assert dropped == {"not_utf8": 1, "no_text": 1}
    capped = list(files.documents(Input("text", ("x",), max_bytes=1000), paths, 100, dropped))
    assert capped == found[: len(capped)]
    assert 900 < sum(map(len, capped)) <= 1000
    dropped.clear()
    assert list(files.documents(Input("jsonl", ("x",), field="body"), [folder / "b.jsonl"], 100, dropped)) == [
        "one two"
    ]
    assert dropped == {"no_text": 1}
