"""The crawl of the quality steps' page: what is read of it, and what its two recipes share."""

from __future__ import annotations

import json
import random
from pathlib import Path

from data_mixtures import recipe_file
from examples import crawl_corpus

ROOT = Path(__file__).parents[2]
WORDS = ["".join(random.Random(n).choices("etaoinshrdlu", k=2 + n % 7)) for n in range(500)]


def prose(number: int) -> str:
    draw = random.Random(number)
    return " ".join(draw.choices(WORDS, k=300)) + "."


def test_the_recipes_differ_in_the_steps_of_what_is_trained_on() -> None:
    raw, steps = (recipe_file.load(ROOT / f"examples/{name}.toml") for name in ("crawl", "crawl-quality"))
    assert raw.filter.steps == ()
    assert steps.filter.steps == ("gopher_quality", "fineweb_quality")
    assert steps.source("clean").steps == (), "no step chooses what is validated on"
    assert steps.held_out_of("crawl") == 0
    assert steps.sources == raw.sources


PAGE = """<html><head><title>Names</title><style>p { color: red }</style></head><body><ul><li>Home<li><a>Up</a></ul>
<p>A line of prose,
  broken by its <em>editor</em>.</p><pre>if a:
    b()</pre><script>let x = "<p>no</p>"</script>
<table><tr><td>1</td><td>2&nbsp;&lt;</td></tr></table></body></html>"""


def test_a_page_is_read_as_a_crawler_would(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE)
    lines = ["Names", "Home", "Up", "A line of prose, broken by its editor.", "if a:", "b()", "1", "2 <"]
    assert crawl_corpus.page(tmp_path / "page.html") == ["\n".join(lines)]


def test_the_book_is_not_in_the_crawl(tmp_path: Path) -> None:
    for number, name in enumerate((*crawl_corpus.CRAWL, crawl_corpus.CLEAN)):
        for part in ("usr/share/doc/x", "usr/share/doc/debian-handbook/html/en-US"):
            folder = tmp_path / ".packages" / name / part
            folder.mkdir(parents=True)
            (folder / "a.html").write_text(f"<p>{prose(number)} {part}</p>" + "<p>more" * 2000)
    crawl_corpus.main(tmp_path)
    found = {name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("clean", "crawl")}
    assert [len(found[name]) for name in ("clean", "crawl")] == [1, 2 * len(crawl_corpus.CRAWL)]
    assert not {*found["clean"]} & {*found["crawl"]}
    assert max(len(json.loads(line)["text"]) for line in found["crawl"]) == crawl_corpus.MAX_CHARS
