"""Text as a crawl brings it, for the ablation of the quality steps: `python -m examples.crawl_corpus --out DIR`.

DIR/crawl.jsonl holds documents of the demo's `web` (documentation as prose) among what this machine has besides:
scripts, style sheets, markup, tables, changelogs, licences. DIR/clean.jsonl holds documents of `web` alone, chosen
by a hash of their text before any filter, and none of them is in crawl.jsonl. The same on one machine alone.
"""

from __future__ import annotations

from pathlib import Path

import tyro
import xxhash

from examples import corpus

MAX_CHARS = 6000  # of a document, about a page
CLEAN_OF_8 = 1  # so many of 8 documents of `web` are clean.jsonl's
DIRT = {
    "scripts and styles": ("{site_packages}/**/*.js", "{site_packages}/**/*.css", "/usr/share/**/*.js"),
    "markup": ("{site_packages}/**/*.html", "/usr/share/**/*.html", "/usr/share/**/*.xml", "/usr/share/**/*.svg"),
    "tables": ("{site_packages}/**/*.csv", "{site_packages}/**/*.json", "{site_packages}/**/RECORD"),
    "changes and licences": ("/usr/share/doc/*/changelog*", "/usr/share/doc/*/copyright"),
}  # fmt: skip
DIRT_BYTES = 1_500_000  # of each kind


def main(out: Path) -> None:
    """Write crawl.jsonl and clean.jsonl."""
    dirt = [(pages(corpus.read(corpus.plain, *paths)), DIRT_BYTES) for paths in DIRT.values()]
    corpus.write(out, {"clean": [(web(True), None)], "crawl": [(web(False), None), *dirt]})


def web(clean: bool) -> corpus.Texts:
    """The documents of the demo's `web` that are clean.jsonl's, or crawl.jsonl's."""
    for texts, most in corpus.demo()["web"]:
        for text in corpus.capped(pages(texts), most):
            if (xxhash.xxh3_64_intdigest(text.encode(errors="ignore")) % 8 < CLEAN_OF_8) == clean:
                yield text


def pages(texts: corpus.Texts) -> corpus.Texts:
    """Their first pages."""
    return (text[:MAX_CHARS] for text in texts)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m examples.crawl_corpus")
