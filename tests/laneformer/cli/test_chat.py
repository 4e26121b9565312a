"""Tests of laneformer chat through pipes and in a pseudo terminal."""

import fcntl
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tokenizers import AddedToken

from laneformer.cli import main
from laneformer.cli.chat import CONTROLS, Terminal
from laneformer.cli.conversation import Conversation
from laneformer.engine import Engine
from tests.laneformer.cli.conftest import END, TEMPLATE, talker, tokenizer
from tests.laneformer.engine.assets import random_model, small_config


def talk(folder, lines, monkeypatch, *flags):
    data = lines.encode() if isinstance(lines, str) else lines
    # as Python opens its own
    stdin = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", newline="\n")
    monkeypatch.setattr(sys, "stdin", stdin)
    main(["chat", str(folder), "--threads", "1", "--max-new-tokens", "12", *flags])


def test_a_conversation_through_pipes(folder, tmp_path, monkeypatch, capsys):
    # lines end as on Linux or as on Windows
    file = tmp_path / "chat.json"
    input_lines = (
        f'hi\\\r\nthere\r\n"""\r\na\r\n\r\n  b"""\n/sav\n/nonsense\n\n/save\n/save {file}\n/help'
    )
    talk(folder, input_lines, monkeypatch, "--system", "be d", "--temperature", "0.7")
    printed = capsys.readouterr()
    system, first_question, first_answer, second_question, second_answer = json.loads(
        file.read_text()
    )
    assert system["content"] == "be d"
    assert first_question["content"] == "hi\nthere"
    assert second_question["content"] == "a\n\n  b"
    assert printed.out == f"{first_answer['content']}\n{second_answer['content']}\n".translate(
        CONTROLS
    )
    with Engine.from_pretrained(folder) as engine:
        text = "<|begin|>s\nbe d<|end|>\n<|begin|>u\nhi\nthere<|end|>\n<|begin|>a\n"
        assert first_answer["content"] == engine.generate_text(
            text, max_new_tokens=12, temperature=0.7
        )
    for message in (
        "did you mean /save?",
        "unknown command /nonsense; there are /help",
        "give a file: /save FILE",
        "5 messages in",
        "/retry   answer the last message once more",
    ):
        assert message in printed.err
    speed = r"^12 tokens, [\d.]+ tokens/s, first after [\d.]+ s, \d+ of \d+ prompt"
    assert len(re.findall(speed, printed.err, re.M)) == 2


def test_the_next_prompt_goes_on_where_the_cache_ends(folder):
    # also if the reply's text encodes to other ids, as a random model's nearly always does
    with Engine.from_pretrained(folder, threads=1) as engine:
        conversation = Conversation(engine, [])
        for turn, text in enumerate(("hi", "there", "you")):
            reply = conversation.fit([*conversation.messages, {"role": "user", "content": text}])
            previous = conversation.last
            conversation.complete(
                reply, print, print, max_new_tokens=20, temperature=1.0, seed=turn
            )
            if previous:
                ids = previous.ids if previous.ids[-1] != END else previous.ids[:-1]
                prefix = [*previous.prompt, *ids]
                assert reply.prompt[: len(prefix)] == prefix
                closing = engine.tokenizer.decode(
                    reply.prompt[len(prefix) :], skip_special_tokens=False
                )
                assert closing.startswith("<|end|>\n")
                assert engine.tokenizer.encode(previous.text).ids != ids
                assert reply.statistics.reused_tokens >= len(prefix) - 1
        assert conversation.fit(conversation.messages[:-1]).prompt == reply.prompt, "once more"


HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|return|>"]  # and <|end|>


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("<think>\nHm.\n</think>\n\nYes.<|end|>", ""),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            "{# <|channel|>analysis #}",
        ),
    ],
    ids=["think", "harmony"],
)
def test_reasoning_is_beside_the_answer(text, more, monkeypatch, capsys):
    own_tokenizer = tokenizer()
    own_tokenizer.add_special_tokens([AddedToken(name, special=True) for name in HARMONY])
    ids = own_tokenizer.encode(text, add_special_tokens=False).ids

    def stream(prompt, **options):
        yield from ids

    engine = SimpleNamespace(
        tokenizer=own_tokenizer,
        tokenizer_config={"chat_template": TEMPLATE + more},
        eos_ids=(ids[-1],),
        config=small_config(max_position_embeddings=999),
        stream=stream,
        statistics=SimpleNamespace(reused_tokens=0, proposed_tokens=0),
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    conversation = Conversation(engine, [])
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    terminal = Terminal(conversation, {"max_new_tokens": 999}, console)
    for question in ("hi", "so?"):
        terminal.answer([*conversation.messages, {"role": "user", "content": question}])
        printed = capsys.readouterr()
        assert printed.out == "Yes.\n"
        assert printed.err.startswith("Hm.")
        assert "<" not in printed.err
    assert [message["content"] for message in conversation.messages] == [
        "hi",
        "Yes.",
        "so?",
        "Yes.",
    ]
    assert "Hm." not in conversation.last.rendered, "the next prompt is without it"
    pieces = []  # laneformer generate --chat --stop
    reply = conversation.fit([{"role": "user", "content": "hi"}])
    conversation.complete(reply, pieces.append, print, ["s."])
    assert "".join(pieces) == "Ye"


def test_oldest_turns_go_when_the_context_is_full(folder, tmp_path, monkeypatch, capsys):
    # a letter is a token: the line of 5,000 is refused whole, and the fourth question needs the
    # room of the first two turns
    file = tmp_path / "chat.json"
    long = "x" * 900
    lines = [f"1{long}", f"2{long}", f"3{long}", "y" * 5000, f"4{long}", f"/save {file}"]
    talk(folder, "\n".join(lines), monkeypatch, "--system", "s", "--greedy")
    printed = capsys.readouterr()
    assert "prompt of 50" in printed.err
    assert "but the context holds 4096; shorten it" in printed.err
    assert "the context is full: the 4 oldest messages are dropped" in printed.err
    messages = json.loads(file.read_text())
    assert [m["content"][0] for m in messages if m["role"] != "assistant"] == ["s", "3", "4"]


def test_retry_reset_system_and_load(folder, tmp_path, monkeypatch, capsys):
    first, second, third = (tmp_path / f"{i}.json" for i in range(3))
    commands = f"hi\n/save {first}\n/retry\n/save {second}\n/reset\n/retry\n/system b\n/system\n/save {third}"
    talk(folder, commands, monkeypatch, "--temperature", "1")
    first_messages = json.loads(first.read_text())
    second_messages = json.loads(second.read_text())
    assert first_messages[0] == second_messages[0]
    assert first_messages[1] != second_messages[1]
    assert json.loads(third.read_text()) == []
    assert "there is nothing to answer yet" in capsys.readouterr().err
    commands = f"/retry\n/save {second}\n/save {folder}/config.json"
    talk(folder, commands, monkeypatch, "--temperature", "1", f"--load={first}")
    assert json.loads(second.read_text()) == second_messages, (
        "the prompt encoded again gives the same answer"
    )
    # /save does not overwrite a file that holds no conversation
    assert "message 0 is {'model_type'" in capsys.readouterr().err
    assert "laneformer" in (folder / "config.json").read_text()
    first.write_text('[{"role": "tool"}]')
    with pytest.raises(SystemExit):
        talk(folder, "", monkeypatch, f"--load={first}")
    assert "message 0 is {'role': 'tool'}; it needs a role" in capsys.readouterr().err


def test_what_a_terminal_would_obey_is_not_printed(folder, monkeypatch, capsys):
    talk(folder, b"\xff\xfe\n", monkeypatch, "--temperature", "1.3", "--max-new-tokens", "900")
    assert not set(capsys.readouterr().out) & {
        chr(c) for c in (*range(9), *range(11, 32), 127, 0x9B)
    }


class PseudoTerminal:
    def __init__(self, *command: str):
        self.end, end = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm"},
            # its controlling terminal, or Ctrl-C would reach no process
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(end)
        self.seen = ""

    def send(self, text: str):
        os.write(self.end, text.encode())

    def read(self, timeout_s: float):
        if select.select([self.end], [], [], timeout_s)[0]:
            text = os.read(self.end, 65536).decode(errors="replace")
            # pastes are asked for in brackets, or no more
            self.seen += re.sub(r"\x1b\[\?2004[hl]", "", text)

    def expect(self, pattern: str, timeout_s: float = 60) -> str:
        """Return the output up to and including the pattern."""
        deadline_s = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.seen, re.S)):
            assert time.monotonic() < deadline_s, f"no {pattern!r} in {self.seen!r}"
            self.read(0.1)
        matched = self.seen[: match.end()]
        self.seen = self.seen[match.end() :]
        return matched

    def interrupt_answer(self):
        """Send Ctrl-C once a line of endless text has come."""
        self.expect("\r\n.{40}")
        self.send("\x03")
        assert "stopped" in self.expect("prompt tokens cached[^\n]*\n.*> ")


def test_under_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(tmp_path):
    model = random_model(small_config(vocab_size=268, max_position_embeddings=100_000))
    with torch.no_grad():
        # its logit is never the highest: the model does not come to an end
        model.lm_head.weight[-1, -1] = 0
    folder = talker(tmp_path / "chat", model)
    file = tmp_path / "chat.json"
    flags = ["--threads=1", "--greedy", "--no-cache"]
    terminal = PseudoTerminal(sys.executable, "-m", "laneformer.cli", "chat", str(folder), *flags)
    try:
        terminal.expect("Ctrl-D leaves.*> ")
        terminal.send("helo\x02l\n")  # back by one and in between: a line that is edited
        terminal.interrupt_answer()
        terminal.send("\x1b[A\x7f")  # the line before, without its last letter
        assert terminal.expect("hell").endswith("hell")
        terminal.send("\n")
        terminal.interrupt_answer()
        terminal.send("\x1b[200~one\rtwo\x1b[201~")  # a paste of two lines is one message
        terminal.expect("two")
        terminal.send("\n")
        terminal.interrupt_answer()
        terminal.send("half a line")
        terminal.expect("half a line")
        # between two looks, Python's `input` overhears a signal until a key comes
        while "\n> " not in terminal.seen:
            terminal.send("\x03")
            deadline_s = time.monotonic() + 2
            while "\n> " not in terminal.seen and time.monotonic() < deadline_s:
                terminal.read(timeout_s=0.1)
        terminal.expect("\n> ")
        terminal.send(f"/save {file}\n")
        terminal.expect("6 messages in.*> ")  # readline is there to see the key
        terminal.send("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
    messages = [message["content"] for message in json.loads(file.read_text())[::2]]
    assert messages == ["hello", "hell", "one\ntwo"]
