"""The playground in a real browser, in front of a stand-in server that is as fast, or breaks, as
a test wants it.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import Page, needs_browser
from tests.laneformer.serve.stand_in import FOLDER, StandIn

pytestmark = needs_browser
IDLE = "!document.body.classList.contains('running')"
ANSWERED = f"{IDLE} && document.querySelector('article.assistant:last-child footer')"

TEXT = """# Two *sorted* lists

A **bold** claim, `code < 1`, [a link](https://example.org/a_(b)) and https://example.org/x_y_z.
Next line of 2*3*4 and snake_case_name, ~~gone~~, \\*escaped\\*.

- one
- two
  1. deeper
  2. and deeper
     ```c
     int x = 1;
     ```
- three

3. third

4. fourth

> quoted
> twice

| left | right |
|:-----|------:|
| a    | `1`   |
| b    | **2** |

```python
def merge(a, b):  # a comment
    \"\"\"Two lines
    of text.\"\"\"
    return "a < b", 1.5e3
```

---

Last *words*.
"""
RENDERED = (
    '<h3>Two <em>sorted</em> lists</h3><p>A <strong>bold</strong> claim, <code>code &lt; 1</code>, '
    '<a href="https://example.org/a_(b)" target="_blank" rel="noopener noreferrer">a link</a> and '
    '<a href="https://example.org/x_y_z" target="_blank" rel="noopener noreferrer">https://example.org/x_y_z</a>.<br>'
    "Next line of 2*3*4 and snake_case_name, <del>gone</del>, *escaped*.</p>"
)  # fmt: skip
HOSTILE = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "**<svg onload=window.pwned=1>**",
    "[click](javascript:window.pwned=1)",
    "[click](JaVaScRiPt:window.pwned=1) [a](data:text/html,<script>window.pwned=1</script>)",
    "[b](vbscript:x) [c](//evil)",
    '![x](javascript:window.pwned=1) ![y](https://example.org/x.png"onerror="window.pwned=1)',
    'https://example.org/"onmouseover="window.pwned=1',
    "```html\n<script>window.pwned = 1</script>\n```",
    "```\"><img/src=x/onerror=window.pwned=1>\n<iframe srcdoc='<script>parent.pwned=1</script>'>\n```",
    "| a |\n|---|\n| <b onclick=window.pwned=1>x</b> |",
    "# <style>*{display:none}</style>",
    "&lt;script&gt;window.pwned=1&lt;/script&gt; \u202e\ud83d\ude00",
]


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with StandIn() as server:
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


@pytest.fixture
def page(browser: Page, server: StandIn) -> Page:
    """The page in its first state."""
    server.reset()
    browser.size(1400, 900)
    if browser.run("location.protocol") == "http:":
        browser.run("localStorage.clear(), sessionStorage.clear()")
    browser.open(server.address)
    browser.until("document.querySelector('#model').innerText")
    return browser


def say(page: Page, text: str, until: str | None = ANSWERED) -> None:
    page.run("document.querySelector('#prompt').focus()")
    page.type(text)
    page.press("Enter", "\r")
    page.until(
        f"!document.querySelector('#prompt').value && document.querySelector('article') && ({until or 'true'})"
    )


def text(page: Page, selector: str) -> str:
    return page.run(f"[...document.querySelectorAll({selector!r})].at(-1)?.innerText ?? ''")


def test_reasoning_is_folded(page: Page, server: StandIn) -> None:
    say(page, "THINK about it")
    assert text(page, "article.assistant .body") == "You said: THINK about it"
    for _ in range(2):
        assert page.run("document.querySelector('article.assistant details').open") is False
        assert (
            page.run("document.querySelector('article.assistant details p').textContent")
            == "First <b>this</b>."
        )
        page.open(server.address)  # kept with the chat
        page.until("document.querySelector('article.assistant footer')")
    say(page, "Hello again")
    assert server.requests[-1]["messages"][1] == {"role": "assistant", "content": "You said: THINK about it"}


def test_an_answer_streams_beside_its_speed(page: Page, server: StandIn) -> None:
    assert "500" in text(page, "#promise")
    assert text(page, "#model") == "stand-in"
    say(page, "Hello **there**")
    assert text(page, "article.user .body") == "Hello **there**", "what the user writes stays as it is"
    assert text(page, "article.assistant .body") == "You said: Hello there"
    assert re.fullmatch(r"[\d.,]+", text(page, "#rate"))
    percent = re.match(r"(\d+)% of this machine’s memory limit of 500 tokens/s", text(page, "#limit"))
    assert percent
    assert abs(int(percent[1]) - float(text(page, "#rate").replace(",", "")) / 5) < 0.6, "of 500"
    assert text(page, "#cached") == "212 of 240"
    assert all(re.fullmatch(r"[\d.]+ m?s", text(page, f"#{name}")) for name in ("ttft", "p50", "p99"))
    assert re.search(
        r"7 tokens · [\d.]+ tokens/s · first after .* · seed \d+", text(page, "article.assistant footer")
    )
    (sent,) = server.requests
    assert set(sent) == {"model", "messages", "seed", "stream", "stream_options"}, (
        "the server's defaults are not sent"
    )
    assert sent["messages"] == [{"role": "user", "content": "Hello **there**"}]
    say(page, "And?")
    assert [message["role"] for message in server.requests[-1]["messages"]] == ["user", "assistant", "user"]
    page.open(server.address)
    page.until("document.querySelectorAll('article').length === 4")
    assert page.console == []


def test_markdown_is_the_same_streamed_and_at_once(page: Page) -> None:
    rendered = page.run(RENDER % (repr(TEXT), repr(TEXT)))
    for streamed, whole in zip(*rendered[:-1], strict=True):
        assert streamed == whole
    html = rendered[0][0]
    assert html.startswith(RENDERED)
    assert (
        '<ol start="3"><li>third</li><li>fourth</li></ol><blockquote><p>quoted<br>twice</p></blockquote>'
        in html
    )
    assert '<td class="left">a</td><td class="right"><code>1</code></td>' in html
    assert '<span class="call">merge</span>(a, b):  <span class="comment"># a comment</span>' in html
    assert '<span class="string">    of text."""</span>' in html, "a string over two lines"
    assert '<li>two<ol start="1"><li>deeper</li><li>and deeper<figure class="code">' in html
    assert html.endswith("<hr><p>Last <em>words</em>.</p>")
    assert rendered[-1] < 40, "nodes that a last character has drawn again"


# (streamed by 1, 3 and 50 characters, at once three times, elements that the last push has made)
RENDER = """import('/playground/markdown.js').then(({ Markdown }) => {
  const render = (text, step) => {
    const target = document.createElement('div'), markdown = new Markdown(target);
    for (let i = 0; i < text.length; i += step) markdown.push(text.slice(i, i + step));
    markdown.end();
    return target.innerHTML;
  };
  const target = document.createElement('div'), markdown = new Markdown(target);
  markdown.push(%s.repeat(50));
  const before = new Set(target.querySelectorAll('*'));
  markdown.push('x');
  const made = [...target.querySelectorAll('*')].filter((element) => !before.has(element)).length;
  const text = %s;
  return [[1, 3, 50].map((step) => render(text, step)), [1, 3, 50].map(() => render(text, 1e9)), made];
})"""


def test_what_a_model_writes_never_runs(page: Page, server: StandIn) -> None:
    server.texts["attack"] = "\n\n".join(HOSTILE)
    say(page, "attack")
    page.run("new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)))")
    assert page.run("typeof window.pwned") == "undefined"
    forbidden = (
        "script, img, svg, iframe, style, b, [onerror], [onclick], [onload], [onmouseover], [style], [srcdoc]"
    )
    assert page.run(f"document.querySelectorAll('article :is({forbidden})').length") == 0
    links = page.run("[...document.querySelectorAll('article a')].map((a) => a.getAttribute('href'))")
    assert all(link.startswith("https://example.org/") for link in links), links
    shown = page.run("document.querySelector('article.assistant .body').textContent")
    assert "<script>window.pwned = 1</script>" in shown, "as text"
    assert page.console == []


def test_stop_edit_and_regenerate(page: Page, server: StandIn) -> None:
    say(page, "SLOW", "document.querySelector('article.assistant .body').innerText.length > 4")
    assert page.run("document.querySelector('#send').ariaLabel") == "Stop"
    page.press("Escape")
    page.until(ANSWERED)
    assert "stopped" in text(page, "article.assistant footer")
    wait_for(lambda: server.cancelled == 1)
    page.run("document.querySelector('#prompt').focus()")
    page.press("ArrowUp")
    page.until("document.activeElement.matches('article textarea')")
    page.run("document.activeElement.select()")
    page.type("Quick")
    page.press("Enter", "\r")
    page.until(ANSWERED)
    assert text(page, "article.assistant .body") == "You said: Quick"
    assert page.run("document.querySelectorAll('article').length") == 2
    page.run("document.querySelector('article.assistant footer button:nth-of-type(2)').click()")
    page.until(IDLE)
    wait_for(lambda: len(server.requests) == 3)
    edited, again = server.requests[1:]
    assert edited["messages"] == again["messages"] == [{"role": "user", "content": "Quick"}]
    assert edited["seed"] != again["seed"], "without a seed of the user, another answer"


def test_chats_are_left_opened_and_deleted_with_a_way_back(page: Page, server: StandIn) -> None:
    earlier = (
        "[...document.querySelectorAll('#earlier li')].map((row) => row.innerText.trim().split('\\n')[0])"
    )
    for said in ("First", "Second"):
        say(page, said)
        page.run("document.querySelector('#new').click()")
    assert page.run(earlier) == ["Second", "First"]
    say(page, "SLOW", "document.querySelector('article.assistant .body').innerText.length > 4")
    page.run("document.querySelector('#new').click()")
    page.until(
        f"{IDLE} && JSON.parse(localStorage['laneformer.chats'])[0].length === 2"
    )  # with what was said so far
    delete = "document.querySelector('#earlier [aria-label=\"Delete the chat: Second\"]').click()"
    page.run(delete)
    assert page.run(earlier) == ["SLOW", "First", "“Second” is deleted."]
    page.run("document.activeElement.click()")
    assert page.run(earlier) == ["SLOW", "Second", "First"]
    page.run(delete)
    page.open(server.address)
    page.until("document.querySelector('#model').innerText")
    assert page.run(earlier) == ["SLOW", "First"], "remembered"
    page.run("[...document.querySelectorAll('#earlier button')].find((b) => b.innerText === 'First').click()")
    assert text(page, "article.assistant .body") == "You said: First"
    assert page.run("JSON.parse(localStorage['laneformer.chats']).length") == 1


def test_copy_and_export(page: Page, server: StandIn) -> None:
    """What would go to the clipboard and into the file."""
    code = "```python\nprint(1)\n```"
    server.texts["Code"] = code
    say(page, "Code")
    page.run(
        "window.copied = [], navigator.clipboard.writeText = async (text) => void copied.push(text),"
        "URL.createObjectURL = (blob) => (blob.text().then((text) => window.written = text), 'blob:x'),"
        "HTMLAnchorElement.prototype.click = function () { window.file = this; }"
    )
    page.run("document.querySelector('article.assistant .copy').click()")
    page.run(
        "[...document.querySelectorAll('article.assistant footer button')].find((b) => b.innerText === 'Copy').click()"
    )
    page.until("copied.length === 2")
    assert [text.strip() for text in page.run("copied")] == ["print(1)", code]
    page.run("document.querySelector('#export').click()")
    page.until("window.written")
    assert page.run("file.download") == "laneformer-chat.json"
    assert [message["content"] for message in json.loads(page.run("written"))["messages"]] == ["Code", code]


def test_settings_are_sent_and_remembered(page: Page, server: StandIn) -> None:
    page.click("#open-settings")
    field = "document.querySelector('#settings [name=%s]')"
    assert page.run(f"{field % 'top_k'}.placeholder") == "50", "the model's default"
    for name, value in {"temperature": "0", "seed": "7", "system": "Be brief.", "top_p": "3"}.items():
        page.run(f"{field % name}.value = {value!r}")
        page.run(f"{field % name}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    page.open(server.address)
    page.until(f"{field % 'seed'}?.value === '7'")
    say(page, "Hi")
    sent = server.requests[-1]
    assert (sent["temperature"], sent["seed"], "top_p" in sent) == (0, 7, False), (
        "a value out of range is not sent"
    )
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    page.click("#reset")
    say(page, "Hi again")
    assert "temperature" not in server.requests[-1]
    assert len(server.requests[-1]["messages"]) == 3


def test_errors_in_the_words_of_the_server(page: Page, server: StandIn) -> None:
    server.refusals = 1
    say(page, "Hello", "document.querySelector('.notice')")
    assert "16 requests wait already" in text(page, ".notice")
    assert "wait 2 s" in text(page, ".notice")
    page.click(".notice button")
    page.until(ANSWERED)
    assert text(page, "article.assistant .body") == "You said: Hello"
    say(page, "BREAK here please", "document.querySelector('.notice')")
    assert "connection was lost" in text(page, ".notice")
    assert text(page, "article.assistant .body").startswith("You said: BREAK")
    page.click(".notice button")
    page.until("document.querySelector('.notice')")
    assert page.run("document.querySelectorAll('article').length") == 4, "the broken answer is replaced"


def test_a_key_is_asked_for(page: Page, server: StandIn) -> None:
    server.key = "secret"
    page.open(server.address)
    page.until("document.querySelector('.notice input[type=password]')")
    page.run("document.querySelector('.notice input').focus()")
    page.type("secret")
    page.press("Enter", "\r")
    page.until("document.querySelector('#model').innerText && !document.querySelector('.notice')")
    say(page, "Hello")
    assert text(page, "article.assistant .body") == "You said: Hello"
    assert "secret" not in page.run("JSON.stringify(localStorage)")


def test_nothing_comes_from_another_host() -> None:
    for path in FOLDER.iterdir():
        outside = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", path.read_text(encoding="utf-8"))
        assert [link for link in outside if "www.w3.org" not in link] == [], path


def wait_for(true: Any) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# --- slow
# --------------------------------------------------------------------------------------------------------


@pytest.mark.job
def test_2000_tokens_a_second_leave_the_page_alive(page: Page) -> None:
    page.run(
        "window.frames_ms = [], function tick(now) { frames_ms.push(now), requestAnimationFrame(tick) }(0)"
    )
    say(page, "FAST 8000", "document.body.classList.contains('running')")
    page.run("frames_ms.length = 0")
    page.until(ANSWERED, 60)
    frames_ms = page.run("frames_ms")
    gaps = [after - before for before, after in itertools.pairwise(frames_ms)]
    written = page.run("document.querySelector('article.assistant .body').textContent")
    assert len(re.findall(r"w\d+|item", written)) == 8000
    assert len(gaps) / sum(gaps) * 1000 > 10, "frames a second; 60 on a machine that has nothing else to do"
    assert page.console == []


@pytest.mark.job
def test_a_busy_machine_is_told(page: Page, server: StandIn) -> None:
    limit = "document.querySelector('#limit').textContent"
    for share, told in (
        (0.55, f"{limit}.includes('busy: the engine had 55% of')"),
        (0.95, f"!{limit}.includes('busy')"),
    ):
        server.processor_share = share
        say(page, "Compare")
        page.until(told)
    assert "tokens/s" in text(page, "#limit")


@pytest.mark.job
def test_what_is_left_over_a_slower_link_is_told(page: Page, server: StandIn) -> None:
    assert page.run("document.querySelector('#link').hidden")
    server.link = {"us": 100.0, "tokens_per_s": 150.0, "tokens_per_s_without": 200.0}
    page.run("location.reload()")
    page.until("document.querySelector('#link')?.textContent.includes('75% of')")
    say(page, "Compare")
    told = "Lanes hear each other 100 µs late, as over a link: 75% of 200 tokens/s without it."
    assert text(page, "#link") == told
    assert page.run("document.querySelector('#link').getBoundingClientRect().height > 0")


@pytest.mark.job
def test_drafts_are_switched_and_compared(page: Page, server: StandIn) -> None:
    checked = "document.querySelector('#drafts').getAttribute('aria-checked')"
    server.texts["Compare"] = "one lane reads, one lane writes, " * 12
    say(page, "Compare")
    assert page.run(checked) == "true"
    for drafts in ("false", "true"):
        page.click("#drafts")
        page.until(
            f"{ANSWERED} && document.querySelector('#compared').textContent.includes('tokens/s with')", 30
        )
        assert page.run(checked) == drafts
        found = re.fullmatch(COMPARED, text(page, "#compared"))
        assert found
        with_drafts, without = (float(found[i].replace(",", "")) for i in (1, 2))
        ratio = float(found[3] or 1) if found[4] != "slow" else 1 / float(found[3])
        assert with_drafts / without == pytest.approx(ratio, rel=0.03), "whatever else this machine does"
        now = found[2] if drafts == "false" else found[1]
        assert f" {now} tokens/s" in text(page, "article.assistant footer")
        page.run("document.querySelector('#compared').textContent = ''")
    first, off, on = server.requests
    assert (first.get("speculate"), off["speculate"], on.get("speculate")) == (None, 0, None)
    assert first["seed"] == off["seed"] == on["seed"]
    assert first["messages"] == off["messages"] == on["messages"], "the answer has been taken back"
    assert page.run("document.querySelectorAll('article').length") == 2
    page.click("#open-settings")
    page.run("document.querySelector('[name=speculate]').focus()")
    page.type("0")
    assert page.run(checked) == "false", "the field and the switch are one setting"


@pytest.mark.job
@pytest.mark.parametrize("dark", [False, True])
def test_phone_width_names_and_contrast(page: Page, server: StandIn, dark: bool) -> None:
    server.texts["long"] = TEXT + "\n```\n" + "x" * 300 + "\n```\n" + "y" * 300
    say(page, "long")
    page.size(390, 844, dark)
    for click in ("#drafts", "#open-settings", "#close-settings", "#theme"):
        page.click(click)
        assert page.run("document.documentElement.scrollWidth") <= 390, click
        assert page.run(UNNAMED) == []
        assert page.run(FAINT) == []


COMPARED = (
    r"([\d.,]+) tokens/s with, ([\d.,]+) without: (?:([\d.]+)× as (fast|slow)|as fast), the same answer\."
)
UNNAMED = """[...document.querySelectorAll('button, input, textarea, select, [role]')].filter((e) => e.checkVisibility()
  && !(e.ariaLabel || e.innerText || e.labels?.length || e.getAttribute('aria-labelledby'))
  && !['log', 'tablist', 'status'].includes(e.role)).map((e) => e.outerHTML)"""
# texts with a contrast below 4.5 : 1 against the nearest background
FAINT = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const luminance = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const linear = (c) => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return color === 'rgba(0, 0, 0, 0)' && element.parentElement ? behind(element.parentElement) : color;
  };
  const contrast = (element) => {
    const [dark, light] = [getComputedStyle(element).color, behind(element)].map(luminance).sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const written = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  return [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() && written(e) && contrast(e) < 4.5)
    .map((e) => `${contrast(e)} ${e.outerHTML.slice(0, 90)}`);
})()"""
