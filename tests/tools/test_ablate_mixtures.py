"""The ablation of the quality steps: its recipes are prepared, its mixtures compared on one held-out text."""

import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from data_mixtures import prepare, recipe_file
from data_mixtures.prepare import Options
from examples import crawl_corpus
from tools.ablate import mixtures

ROOT = Path(__file__).parents[2]
WORDS = ["".join(random.Random(n).choices("etaoinshrdlu", k=2 + n % 7)) for n in range(500)]


def prose(number: int) -> str:
    draw = random.Random(number)
    return " ".join(draw.choices(WORDS, k=300)) + "."


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("crawl")
    (out / "corpus").mkdir()
    for name, texts in (("crawl", range(150)), ("clean", range(150, 210))):
        lines = "".join(json.dumps({"text": prose(n)}) + "\n" for n in texts)
        (out / f"corpus/{name}.jsonl").write_text(lines)
    prepare.prepare(ROOT / "examples/crawl.toml", out, Options(), Console(quiet=True))
    return out


@pytest.mark.rotate
def test_mixtures_are_compared_in_bits_per_byte_by_seed(data: Path, tmp_path: Path, monkeypatch) -> None:
    losses = {("raw", 0): 2.0, ("raw", 1): 2.2, ("steps", 0): 1.9, ("steps", 1): 2.0}
    asked = []

    def run_job(job, training, out, keep_weights):
        asked.append((job.variant, job.seed, training.steps))
        loss = losses[job.variant, job.seed]
        return {**vars(job), "tokens": training.tokens, "parameters": 1, "valid_loss": loss}

    monkeypatch.setattr(mixtures, "run_job", run_job)
    lock, page = data / "phase1.lock.json", tmp_path / "page.md"
    options = mixtures.Options(
        ROOT / "configs/ablation.toml",
        tmp_path / "runs",
        (f"raw={lock}", f"steps={lock}"),
        seeds=(0, 1),
        page=page,
    )
    monkeypatch.chdir(ROOT)
    mixtures.main(options)
    mixtures.main(options)
    assert asked == [("raw", 0, 300), ("steps", 0, 300), ("raw", 1, 300), ("steps", 1, 300)], "each once"
    bits = mixtures.bits_of_a_nat({"raw": mixtures.held_out(lock, 64)}, data)
    assert 0.3 < bits < 1.45, "tokens of 1 to 5 bytes"
    (row,) = [line for line in page.read_text().splitlines() if line.startswith("| steps ")]
    assert f"{-0.15 * bits:+.4f} ±" in row
    assert f"{1.9 * bits:.4f}" in row


def test_other_held_out_text_is_refused(data: Path) -> None:
    found = mixtures.held_out(data / "phase1.lock.json", 9)
    fewer = {name: [windows[:-1]] for name, (windows, *_) in found.items()}
    with pytest.raises(ValueError, match="raw, steps hold out other windows"):
        mixtures.bits_of_a_nat({"raw": found, "steps": fewer}, data)


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
