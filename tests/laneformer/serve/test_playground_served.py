"""The playground as the real server sends it, in front of a real engine.

The picture in docs/images is made in the same way, with a model and on a machine of one's own:

    .venv/bin/python -m tests.laneformer.serve.test_playground_served MODEL_FOLDER_OR_GGUF
    [OPTIONS OF laneformer serve]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.browser import Page, needs_browser
from tests.laneformer.serve.conftest import Server

pytestmark = [needs_browser, pytest.mark.job]
ROOT = Path(__file__).resolve().parents[3]
PICTURE = ROOT / "docs/images/playground.png"
PROMPT = "Write a Python function that reverses a string."
IDLE = "!document.body.classList.contains('running')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(tmp_path_factory.mktemp("profile"))
    page.size(1400, 900)
    yield page
    page.close()


def visit(page: Page, address: str, settings: str = "{}") -> None:
    page.open(address)
    page.run(f"localStorage.clear(), localStorage.setItem('laneformer.settings', {settings!r})")
    page.open(address)
    page.until("document.querySelector('#model').innerText || document.querySelector('.notice')")


def say(page: Page, text: str) -> None:
    turns = page.run("document.querySelectorAll('article').length")
    page.run("document.querySelector('#prompt').focus()")
    page.type(text)
    page.press("Enter", "\r")
    page.until(f"{IDLE} && document.querySelectorAll('article').length === {turns} + 2", 60)
    page.until("document.querySelector('article:last-child footer')")


def text(page: Page, selector: str) -> str:
    return page.run(f"[...document.querySelectorAll({selector!r})].at(-1)?.textContent ?? ''")


def test_a_conversation_and_drafts(browser: Page, server: Callable[..., Server], model_folder: Path) -> None:
    visit(
        browser,
        server(model_folder).url + "/",
        '{"max_completion_tokens": 150, "temperature": 1, "ignore_eos": true}',
    )
    assert text(browser, "#model") == "tiny"
    assert "tokens/s" in text(browser, "#promise"), "the probe of the machine's memory"
    say(browser, "Hello <b>there</b>")
    assert "150 tokens" in text(browser, "article footer"), "long enough for a speed"
    browser.until("document.querySelector('#limit').textContent.includes('memory limit of')")  # after /props
    assert text(browser, "#cached").startswith("0 of ")
    say(browser, "And?")
    # the conversation is not read again
    browser.until("parseInt(document.querySelector('#cached').textContent) > 10")
    browser.click("#drafts")
    browser.until("document.querySelector('#compared').textContent.includes('without')", 60)
    assert text(browser, "#compared").endswith(", the same answer."), "drafts change no token"
    assert browser.console == [], "nothing that the Content-Security-Policy forbids"


def test_a_key_a_refusal_and_a_server_that_dies(
    browser: Page, server: Callable[..., Server], slow_folder: Path
) -> None:
    running = server(slow_folder, api_key="secret")
    visit(browser, running.url + "/")
    assert "API key" in text(browser, ".notice")
    browser.run("document.querySelector('.notice input').focus()")
    browser.type("secret")
    browser.press("Enter", "\r")
    browser.until("document.querySelector('#model').innerText && !document.querySelector('.notice')")
    browser.run("localStorage.setItem('laneformer.settings', '{\"max_completion_tokens\": 0}')")
    browser.open(running.url + "/")
    browser.until("document.querySelector('#model').innerText")
    browser.run("document.querySelector('#prompt').focus()")
    browser.type("Hello")
    browser.press("Enter", "\r")
    browser.until("document.querySelector('.notice')")
    assert "max_completion_tokens" in text(browser, ".notice"), "the server's own words"
    browser.click("#open-settings")
    browser.click("#reset")
    browser.click(".notice button")
    browser.until("document.querySelector('article.assistant .body')?.innerText.length > 20")
    running.process.kill()
    browser.until("document.querySelector('.notice')")
    assert "connection was lost" in text(browser, ".notice")
    assert len(text(browser, "article.assistant .body")) > 20, "what came is kept"
    browser.click(".notice button")
    browser.until("document.querySelector('.notice')")
    assert "cannot be reached" in text(browser, ".notice")


def take_picture(model: str, *options: str) -> None:
    """An answer of a real model with its figures: docs/images/playground.png."""
    command = [sys.executable, "-m", "laneformer.cli", "serve", model, "--port", "0", *options]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory() as profile:
        page = Page(Path(profile))
        try:
            assert serving.stdout is not None
            address = serving.stdout.readline().split(" at ")[-1].strip()
            page.size(1200, 840)
            visit(page, f"{address}/", '{"max_completion_tokens": 400, "seed": 1}')
            say(page, "Hello! Who are you?")
            say(page, PROMPT)
            page.run("[...document.querySelectorAll('article.user')].at(-1).scrollIntoView()")
            page.size(1200, 840, scale=1.5)
            page.picture(PICTURE)
            print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB, {text(page, '#rate')} tokens/s")
        finally:
            page.close()
            serving.terminate()
            serving.wait(30)


if __name__ == "__main__":
    take_picture(*sys.argv[1:])
