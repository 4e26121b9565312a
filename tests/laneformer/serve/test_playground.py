"""Tests of the playground in a browser, with a stand-in server that is fast or breaks, and a real one."""

import json
import re

import pytest

from tests.browser import Page, needs_browser
from tests.laneformer.serve.conftest import wait_until
from tests.laneformer.serve.stand_in import FOLDER, StandIn

pytestmark = needs_browser
IDLE = "!document.body.classList.contains('running')"
ANSWERED = f"{IDLE} && document.querySelector('article.assistant:last-child footer')"
BEGUN = "document.querySelector('article.assistant .body').innerText.length > 4"
NOTICED = "document.querySelector('.notice')"
READY = "document.querySelector('#model').innerText"

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
    "<h3>Two <em>sorted</em> lists</h3><p>A <strong>bold</strong> claim, <code>code &lt; 1</code>, "
    '<a href="https://example.org/a_(b)" target="_blank" rel="noopener noreferrer">a link</a> and '
    '<a href="https://example.org/x_y_z" target="_blank" rel="noopener noreferrer">https://example.org/x_y_z</a>.<br>'
    "Next line of 2*3*4 and snake_case_name, <del>gone</del>, *escaped*.</p>"
)
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
def stand_in():
    server = StandIn()
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    page = Page(tmp_path_factory.mktemp("profile"))
    page.size(1400, 900)
    yield page
    page.close()


@pytest.fixture
def page(browser, stand_in):
    """Open the page in its first state."""
    stand_in.reset()
    browser.size(1400, 900)
    if browser.run("location.protocol") == "http:":
        browser.run("localStorage.clear(), sessionStorage.clear()")
    browser.open(stand_in.address)
    browser.until(READY)
    return browser


def say(page, text, until=ANSWERED):
    page.run("document.querySelector('#prompt').focus()")
    page.type(text)
    page.press("Enter", "\r")
    page.until(
        f"!document.querySelector('#prompt').value && document.querySelector('article') && ({until})"
    )


def text(page, selector) -> str:
    return page.run(f"[...document.querySelectorAll({selector!r})].at(-1)?.innerText ?? ''")


def count(page, selector) -> int:
    return page.run(f"document.querySelectorAll({selector!r}).length")


def test_an_answer_streams_beside_its_speed(page, stand_in):
    assert "500" in text(page, "#promise")
    say(page, "Hello **there**")
    assert text(page, "article.user .body") == "Hello **there**", (
        "what the user writes stays as it is"
    )
    assert text(page, "article.assistant .body") == "You said: Hello there"
    percent = re.match(
        r"(\d+)% of this machine’s memory limit of 500 tokens/s", text(page, "#limit")
    )
    assert percent
    assert abs(int(percent[1]) - float(text(page, "#rate").replace(",", "")) / 5) < 0.6, "of 500"
    assert text(page, "#cached") == "212 of 240"
    assert all(
        re.fullmatch(r"[\d.]+ m?s", text(page, f"#{name}")) for name in ("ttft", "p50", "p99")
    )
    figures = r"7 tokens · [\d.]+ tokens/s · first after .* · seed \d+"
    assert re.search(figures, text(page, "article.assistant footer"))
    (request,) = stand_in.requests
    assert set(request) == {"model", "messages", "seed", "stream", "stream_options"}, (
        "no defaults of the server"
    )
    assert request["messages"] == [{"role": "user", "content": "Hello **there**"}]
    assert page.console == []


METER = """import('/playground/stream.js').then(({ Meter }) => %s.map((arrivals) => {
    const meter = new Meter();
    for (const [at_ms, tokens] of arrivals) meter.add({ at_ms, tokens });
    const { tokens_per_s, gap_p50_ms, gap_p99_ms } = meter.figures();
    return [tokens_per_s, gap_p50_ms, gap_p99_ms];
}))"""


def test_gaps_are_of_tokens_as_the_rate_is(page):
    # also where several tokens come in one piece
    figures = {
        ((0, 1), (10, 2), (20, 3)): [100, 10, 10],
        ((0, 1), (2, 9), (4, 17)): [4000, 0.25, 0.25],
        ((0, 3), (100, 4), (101, 14), (102, 24)): [21 / 0.102, 0.1, 100],
        ((5, 3),): [None, None, None],
        ((5, 0), (6, 0)): [None, None, None],
    }
    assert page.run(METER % json.dumps([*figures])) == [
        pytest.approx(figure) for figure in figures.values()
    ]


def test_reasoning_is_folded_and_answers_are_copied_and_exported(page, stand_in):
    # including what would go to the clipboard and into the file
    say(page, "THINK about it")
    # a reload: reasoning must survive in the stored chat, folded
    page.open(stand_in.address)  # kept with the chat
    page.until("document.querySelector('article.assistant footer')")
    folded = "document.querySelector('article.assistant details')"
    assert page.run(f"{folded}.open") is False
    assert page.run(f"{folded}.querySelector('p').textContent") == "First <b>this</b>."
    stand_in.texts["Code"] = code = "```python\nprint(1)\n```"
    say(page, "Code", f"{ANSWERED} && document.querySelectorAll('article').length === 4")
    contents = [message["content"] for message in stand_in.requests[-1]["messages"]]
    assert contents == ["THINK about it", "You said: THINK about it", "Code"]
    page.run(
        # record what would be copied and exported
        "window.copied = [], navigator.clipboard.writeText = async (text) => void copied.push(text),"
        "URL.createObjectURL = (blob) => (blob.text().then((text) => window.written = text), 'blob:x'),"
        "HTMLAnchorElement.prototype.click = function () {}"
    )
    page.click("article.assistant .copy")
    page.click("article.assistant:last-child footer button:nth-of-type(1)")
    page.until("copied.length === 2")
    assert [copy.strip() for copy in page.run("copied")] == ["print(1)", code]
    page.click("#export")
    page.until("window.written")
    assert [message["content"] for message in json.loads(page.run("written"))["messages"]] == [
        *contents,
        code,
    ]


def test_markdown_is_the_same_streamed_and_at_once(page):
    streamed, at_once, redrawn = page.run(RENDER % (repr(TEXT), repr(TEXT)))
    assert streamed == at_once
    html = at_once[0]
    assert html.startswith(RENDERED)
    for part in (
        '<ol start="3"><li>third</li><li>fourth</li></ol><blockquote><p>quoted<br>twice</p></blockquote>',
        '<td class="left">a</td><td class="right"><code>1</code></td>',
        'return "a &lt; b", 1.5e3',
        '<li>two<ol start="1"><li>deeper</li><li>and deeper<figure class="code">',
    ):
        assert part in html
    assert html.endswith("<hr><p>Last <em>words</em>.</p>")
    assert redrawn < 40, "nodes that a last character has drawn again"


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


def test_what_a_model_writes_never_runs(page, stand_in):
    stand_in.texts["attack"] = "\n\n".join(HOSTILE)
    say(page, "attack")
    # two frames: the answer is drawn and its handlers, if any, have run
    page.run("new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)))")
    assert page.run("typeof window.pwned") == "undefined"
    tags = "script, img, svg, iframe, style, b"
    attributes = "onerror onclick onload onmouseover style srcdoc"
    forbidden = ", ".join([tags, *(f"[{name}]" for name in attributes.split())])
    assert count(page, f"article :is({forbidden})") == 0
    links = page.run(
        "[...document.querySelectorAll('article a')].map((a) => a.getAttribute('href'))"
    )
    assert all(link.startswith("https://example.org/") for link in links), links
    body = page.run("document.querySelector('article.assistant .body').textContent")
    assert "<script>window.pwned = 1</script>" in body, "as text"
    assert page.console == []


def test_stop_edit_and_regenerate(page, stand_in):
    say(page, "SLOW", BEGUN)
    assert page.run("document.querySelector('#send').ariaLabel") == "Stop"
    page.press("Escape")
    page.until(ANSWERED)
    assert "stopped" in text(page, "article.assistant footer")
    wait_until(lambda: stand_in.cancelled == 1)
    page.run("document.querySelector('#prompt').focus()")
    page.press("ArrowUp")
    page.until("document.activeElement.matches('article textarea')")
    page.run("document.activeElement.select()")
    page.type("Quick")
    page.press("Enter", "\r")
    page.until(ANSWERED)
    assert text(page, "article.assistant .body") == "You said: Quick"
    assert count(page, "article") == 2
    page.click("article.assistant footer button:nth-of-type(2)")
    page.until(IDLE)
    wait_until(lambda: len(stand_in.requests) == 3)
    edited, again = stand_in.requests[1:]
    assert edited["messages"] == again["messages"] == [{"role": "user", "content": "Quick"}]
    assert edited["seed"] != again["seed"], "without a seed of the user, another answer"


def test_chats_are_left_opened_and_deleted_with_a_way_back(page, stand_in):
    def earlier():
        rows = "[...document.querySelectorAll('#earlier li')]"
        return page.run(f"{rows}.map((row) => row.innerText.trim().split('\\n')[0])")

    stored = "JSON.parse(localStorage['laneformer.chats'])"
    for question in ("First", "Second"):
        say(page, question)
        page.click("#new")
    assert earlier() == ["Second", "First"]
    say(page, "SLOW", BEGUN)
    page.click("#new")
    page.until(f"{IDLE} && {stored}[0].length === 2")  # with what was said so far
    delete = '#earlier [aria-label="Delete the chat: Second"]'
    page.click(delete)
    assert earlier() == ["SLOW", "First", "“Second” is deleted."]
    # the way back has the focus
    page.run("document.activeElement.click()")
    assert earlier() == ["SLOW", "Second", "First"]
    page.click(delete)
    page.open(stand_in.address)
    page.until(READY)
    assert earlier() == ["SLOW", "First"], "remembered"
    page.run(
        "[...document.querySelectorAll('#earlier button')].find((b) => b.innerText === 'First').click()"
    )
    assert text(page, "article.assistant .body") == "You said: First"
    assert page.run(f"{stored}.length") == 1


def test_settings_are_sent_and_remembered(page, stand_in):
    page.click("#open-settings")
    field = "document.querySelector('#settings [name=%s]')"
    assert page.run(f"{field % 'top_k'}.placeholder") == "50", "the model's default"
    for name, value in {
        "temperature": "0",
        "seed": "7",
        "system": "Be brief.",
        "top_p": "3",
    }.items():
        page.run(f"{field % name}.value = {value!r}")
        # setting `value` from a script fires no event
        page.run(f"{field % name}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    page.open(stand_in.address)
    page.until(f"{field % 'seed'}?.value === '7'")
    say(page, "Hi")
    request = stand_in.requests[-1]
    assert request["temperature"] == 0
    assert request["seed"] == 7
    assert "top_p" not in request, "a value out of range is not sent"
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    page.click("#reset")
    say(page, "Hi again")
    assert "temperature" not in stand_in.requests[-1]


def test_errors_in_the_words_of_the_server(page, stand_in):
    stand_in.refusals = 1
    say(page, "Hello", NOTICED)
    assert "16 requests wait already" in text(page, ".notice")
    assert "wait 2 s" in text(page, ".notice")
    page.click(".notice button")
    page.until(ANSWERED)
    assert text(page, "article.assistant .body") == "You said: Hello"
    partial = (
        "document.querySelector('article.assistant:last-child .body')?.innerText.includes('BREAK')"
    )
    say(page, "BREAK here please", partial)
    for _ in range(2):
        page.until(partial)
        stand_in.break_now.set()
        page.until(NOTICED)
        assert "connection was lost" in text(page, ".notice")
        assert text(page, "article.assistant .body").startswith("You said: BREAK"), (
            "what came is kept"
        )
        assert count(page, "article") == 4, "the broken answer is replaced"
        stand_in.break_now.clear()
        page.click(".notice button")


def test_nothing_comes_from_another_host():
    for path in FOLDER.iterdir():
        outside = re.findall(
            r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", path.read_text(encoding="utf-8")
        )
        assert [link for link in outside if "www.w3.org" not in link] == [], path


def test_a_busy_machine_drafts_and_a_slower_link_are_told(page, stand_in):
    limit = "document.querySelector('#limit').textContent"
    assert page.run("document.querySelector('#link').hidden")
    stand_in.link = {"us": 100.0, "tokens_per_s": 150.0, "tokens_per_s_without": 200.0}
    page.run("location.reload()")
    page.until(
        "document.querySelector('#link')?.textContent.includes('75% of 200 tokens/s without')"
    )
    stand_in.processor_share = 0.55
    say(page, "Compare")
    page.until(f"{limit}.includes('busy: the engine had 55% of')")
    stand_in.processor_share = 0.95
    say(page, "Compare")
    page.until(f"!{limit}.includes('busy')")
    footer = "document.querySelector('article.assistant:last-child footer')?.innerText"
    # only accepted drafts may explain a rate beyond the limit of one read per token
    for tokens, accepted in ((400, 0), (404, 3)):  # beyond the limit of 500 a second
        stand_in.accepted_tokens = accepted
        say(page, f"FAST {tokens}")
        page.until(f"{footer}.includes('{tokens} tokens') && parseInt({limit}) > 100")
        has_drafts = f"{limit}.includes('drafts give several tokens a read')"
        page.until(f"{has_drafts} === {json.dumps(accepted > 0)}", limit_s=20)


COMPARED = r"([\d.,]+) tokens/s with, ([\d.,]+) without: (?:[\d.]+× as (?:fast|slow)|as fast), the same answer\."


def test_drafts_are_switched_and_compared(page, stand_in):
    checked = "document.querySelector('#drafts').getAttribute('aria-checked')"
    stand_in.texts["Compare"] = "one lane reads, one lane writes, " * 12
    say(page, "Compare")
    assert page.run(checked) == "true"
    for drafts in ("false", "true"):
        page.click("#drafts")
        page.until(
            f"{ANSWERED} && document.querySelector('#compared').textContent.includes('tokens/s with')"
        )
        assert page.run(checked) == drafts
        rates = re.fullmatch(COMPARED, text(page, "#compared"))
        assert rates
        now = rates[2] if drafts == "false" else rates[1]
        assert f" {now} tokens/s" in text(page, "article.assistant footer")
        page.run("document.querySelector('#compared').textContent = ''")
    first, off, on = stand_in.requests
    assert first.get("speculate") is None
    assert off["speculate"] == 0
    assert on.get("speculate") is None
    assert first["seed"] == off["seed"] == on["seed"]
    assert first["messages"] == off["messages"] == on["messages"], "the answer has been taken back"
    assert count(page, "article") == 2


def script_s(page) -> float:
    metrics = page.call("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


@pytest.mark.job
def test_2000_tokens_a_second_leave_the_page_alive(page):
    # drawing takes less of its time than the tokens take to arrive
    page.call("Performance.enable", timeDomain="threadTicks")
    before_s = script_s(page)
    say(page, "FAST 8000")
    busy_s = script_s(page) - before_s
    written = page.run("document.querySelector('article.assistant .body').textContent")
    assert len(re.findall(r"w\d+|item", written)) == 8000
    assert busy_s < 8000 / 2000
    assert page.console == []


@pytest.mark.job
def test_phone_width_names_and_contrast(page, stand_in):
    stand_in.texts["long"] = TEXT + "\n```\n" + "x" * 300 + "\n```\n" + "y" * 300
    say(page, "long")
    for dark in (False, True):
        page.size(390, 844, dark)
        page.click("#open-settings")
        assert page.run("document.documentElement.scrollWidth") <= 390
        assert page.run(UNNAMED) == page.run(FAINT) == []
        page.click("#close-settings")


@pytest.mark.job
def test_a_real_server(browser, server, slow_folder):
    running = server(slow_folder, api_key="secret")
    browser.open(f"{running.url}/")
    settings = '{"max_completion_tokens": 400, "temperature": 1, "ignore_eos": true}'
    browser.run(f"localStorage.setItem('laneformer.settings', {settings!r})")
    browser.open(f"{running.url}/")
    browser.until("document.querySelector('.notice input[type=password]')")
    browser.run("document.querySelector('.notice input').focus()")
    browser.type("secret")
    browser.press("Enter", "\r")
    browser.until(f"{READY} && !{NOTICED}")
    assert text(browser, "#model") == "tiny"
    assert "tokens/s" in text(browser, "#promise"), "the probe of the machine's memory"
    say(browser, "Hello <b>there</b>")
    assert "400 tokens" in text(browser, "article footer")
    # after /props
    browser.until("document.querySelector('#limit').textContent.includes('memory limit of')")
    browser.until("document.querySelector('#cached').textContent.startsWith('0 of ')")
    say(browser, "And?", f"{ANSWERED} && document.querySelectorAll('article').length === 4")
    # the conversation is not read again
    browser.until("parseInt(document.querySelector('#cached').textContent) > 10")
    browser.click("#drafts")
    browser.until("document.querySelector('#compared').textContent.includes('without')")
    assert text(browser, "#compared").endswith(", the same answer."), "drafts change no token"
    forbidden = [line for line in browser.console if "401" not in line]
    assert forbidden == [], "nothing that the Content-Security-Policy forbids"
    assert "secret" not in browser.run("JSON.stringify(localStorage)")
    running.kill()
    say(browser, "Still there?", NOTICED)
    assert "cannot be reached" in text(browser, ".notice")


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
