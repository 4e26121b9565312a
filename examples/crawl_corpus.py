"""Text as a crawl brings it, for the ablation of the quality steps: `python -m examples.crawl_corpus --out DIR`.

DIR/crawl.jsonl holds all text of the HTML pages of documentation packages of Debian: prose among menus, indexes,
lists of functions, code and tables. DIR/clean.jsonl holds an edited book, The Debian Administrator's Handbook,
which no step of a recipe has judged and of which crawl.jsonl has no page. Needs apt-get and dpkg-deb, but not root.
"""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import tyro

from data_mixtures.readers import local
from examples import corpus
from examples.debian_corpus import download

CRAWL = (
    "git-doc", "libreoffice-help-en-us", "libboost1.74-doc", "postgresql-doc-15", "python3.11-doc", "sqlite3-doc",
)  # fmt: skip
CLEAN = "debian-handbook"
MAX_CHARS = 6000  # of a document, about a page
PACKAGE_BYTES = 1_500_000  # of a package of the crawl
LINES = {  # elements whose text begins and ends a line
    "address", "article", "blockquote", "br", "dd", "div", "dl", "dt", "footer", "form", "h1", "h2", "h3", "h4", "h5",
    "h6", "header", "hr", "li", "nav", "ol", "option", "p", "pre", "section", "table", "td", "th", "title", "tr", "ul",
}  # fmt: skip
UNSEEN = {"script", "style"}


def main(out: Path) -> None:
    """Write crawl.jsonl and clean.jsonl."""
    crawl = [(pages(out / ".packages", name, "usr/**/*.html"), PACKAGE_BYTES) for name in CRAWL]
    book = pages(out / ".packages", CLEAN, "usr/share/doc/debian-handbook/html/en-US/*.html")
    corpus.write(out, {"clean": [(book, None)], "crawl": crawl})


def unpack(name: str, folder: Path) -> None:
    """A package of Debian in `folder`/`name`, whole or not at all."""
    package, part = download(name, folder), folder / f"{name}.part"
    subprocess.run(["dpkg-deb", "-x", str(package), str(part)], check=True)
    part.rename(folder / name)
    package.unlink()


def pages(folder: Path, name: str, glob: str) -> corpus.Texts:
    """The first MAX_CHARS of each page of a package, fetched when they are asked for; in an order of the names."""
    if not (folder / name).is_dir():
        unpack(name, folder)
    root = folder.resolve()
    for text in corpus.read(page, f"{root}/{name}/{glob}", beside=root):
        yield text[:MAX_CHARS]


def page(path: Path) -> list[str]:
    """All text of an HTML page, a line for a paragraph, a heading, an item of a menu, a cell or a line of code."""
    reader = _Page()
    reader.feed(local.read(path))
    reader.close()
    lines = (re.sub(r"\s+", " ", line).strip() for line in "".join(reader.found).split("\n"))
    return ["\n".join(line for line in lines if line)]


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.within: list[str] = []  # of elements that are not shown, or whose line breaks count

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in LINES:
            self.found.append("\n")
        if tag in UNSEEN or tag == "pre":
            self.within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in LINES:
            self.found.append("\n")
        if tag in self.within:
            self.within.remove(tag)

    def handle_data(self, data: str) -> None:
        if not UNSEEN & {*self.within}:
            self.found.append(data if "pre" in self.within else data.replace("\n", " "))


if __name__ == "__main__":
    tyro.cli(main, prog="python -m examples.crawl_corpus")
