"""`python -m train.sft`: what lies on disk is what the files say, counted, deduplicated,
held out, and restartable.
"""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece

from data_mixtures.mixture import BEGINS, TRAINED, Mixture, valid_windows
from laneformer.hf.tokenizer import CHAT_TEMPLATE, open_tokenizer
from train.sft import conversations, source
from train.sft.__main__ import Arguments, run
from train.sft.conversations import ROWS_AT_A_TIME, encode_all, rows

ROOT = Path(__file__).resolve().parents[3]
SEQ_LEN = 256


def chat(number: int, turns: int = 1) -> list[dict[str, str]]:
    messages = []
    for turn in range(turns):
        messages += [{"role": "user", "content": f"What is {number} + {turn}?"}]
        messages += [{"role": "assistant", "content": f"It is {number + turn}."}]
    return messages


def write(path: Path, rows: list) -> Path:
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


@pytest.fixture(scope="module")
def tokenizer(prepared_data: Path) -> Path:
    return prepared_data / "tokenizer.model"


@pytest.fixture
def arguments(tmp_path: Path, tokenizer: Path) -> Arguments:
    lines = [{"messages": chat(n, 1 + n % 2)} for n in range(120)]
    conversations = (str(write(tmp_path / "chat.jsonl", lines)),)
    return Arguments(conversations, tokenizer, tmp_path / "out", seq_len=SEQ_LEN, holdout=0.1, workers=1)


def manifest(arguments: Arguments, name: str = "chat") -> dict:
    return json.loads((arguments.out / name / "source.json").read_text())


def texts(windows: np.ndarray, flags: np.ndarray, tokenizer: Path) -> tuple[list[str], list[str]]:
    """The conversations in some windows, whole and (only) what is trained of them; without the padding."""
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    whole, trained = [], []
    for window, marks in zip(windows[:, :-1].tolist(), flags[:, :-1].tolist(), strict=True):
        begins = [i for i, mark in enumerate(marks) if mark & BEGINS] + [len(window)]
        for begin, end in itertools.pairwise(begins):
            if window[begin]:
                whole.append(sp.decode(window[begin:end]))
                trained.append(sp.decode([window[i] for i in range(begin, end) if marks[i] & TRAINED]))
    return whole, trained


def held_out(arguments: Arguments, name: str = "chat") -> tuple[list[str], list[str]]:
    """`texts` of the windows that are held out."""
    found = (valid_windows(arguments.out, name, flags=flags) for flags in (False, True))
    return texts(*found, arguments.tokenizer)


def packed(arguments: Arguments, name: str = "chat") -> tuple[list[str], list[str]]:
    """Prepare a source: `texts` of the windows to train on."""
    mixture = Mixture.open(run(arguments))
    count = manifest(arguments, name)["windows"]
    return texts(mixture.sequences(0, count)[0], mixture.flags(0, count), arguments.tokenizer)


def test_every_conversation_is_trained_or_held_out_and_only_answers_count(arguments: Arguments) -> None:
    whole, trained = packed(arguments)
    whole_held, trained_held = held_out(arguments)
    assert 3 <= len(whole_held) <= 30
    assert not set(whole) & set(whole_held)
    expected = [chat(n, 1 + n % 2) for n in range(120)]
    assert len(whole) + len(whole_held) == 120
    answers = sorted(
        "".join(m["content"] for m in messages if m["role"] == "assistant") for messages in expected
    )
    assert sorted(text.replace("</s>", "") for text in trained + trained_held) == answers
    assert "<|start_header_id|>" not in "".join(trained)


def prepared(arguments: Arguments) -> list[bytes]:
    names = ("shard-00000.bin", "shard-00000.flags.bin", "valid.bin", "valid.flags.bin")
    return [(arguments.out / "chat" / name).read_bytes() for name in names]


def in_sharegpt(turn: dict[str, Any]) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt"}
    rest = {key: value for key, value in turn.items() if key not in ("role", "content")}
    return {"from": names[turn["role"]], "value": turn["content"], **rest}


def test_one_text_gives_the_same_bytes_in_any_order_and_form_and_from_any_workers(
    arguments: Arguments, tmp_path: Path
) -> None:
    """Shuffled with copies, as ShareGPT's turns, in Parquet, in text parts; and behind system messages, which the
    template ignores, also where the model is served.
    """
    turns = [chat(n, 1 + n % 2) for n in range(120)]
    parts = [
        [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in each] for each in turns
    ]
    system = [
        [{"role": ("system", "developer")[n % 2], "content": "Be brief."}, *each]
        for n, each in enumerate(turns)
    ]
    pyarrow.parquet.write_table(pyarrow.table({"messages": turns}), tmp_path / "rows.parquet")
    variants: dict[Path, dict[str, Any]] = {
        write(tmp_path / "again.jsonl.gz", [{"messages": each} for each in turns[60:] + turns[:67]]): {
            "dropped": {"duplicate": 7}
        },
        write(
            tmp_path / "share.jsonl",
            [{"conversations": [*map(in_sharegpt, each)], "id": 3} for each in turns],
        ): {},
        tmp_path / "rows.parquet": {},
        write(tmp_path / "parts.jsonl", [{"messages": each} for each in parts]): {},
        write(tmp_path / "system.jsonl", [{"messages": each} for each in system]): {"system_ignored": 120},
    }
    assert json.loads(run(arguments).read_text())["packing"] == "conversations"
    for path, counts in variants.items():
        workers = 2 if path.suffix == ".gz" else 1
        other = replace(arguments, conversations=(f"chat={path}",), out=tmp_path / path.stem, workers=workers)
        run(other)
        assert prepared(other) == prepared(arguments), path
        assert {key: manifest(other)[key] for key in ("dropped", "system_ignored")} == {
            "dropped": {}, "system_ignored": 0, **counts,
        }  # fmt: skip


def test_what_cannot_be_used_is_counted_by_reason(arguments: Arguments, tmp_path: Path) -> None:
    bad = [
        "{broken", {"text": "x"}, {"messages": [{"role": "tool", "content": "x"}]}, {"messages": chat(1)[1:]},
        {"messages": [{"role": "user", "content": " "}]}, {"messages": chat(1)[:1]}, {"messages": chat(5, 40)},
        {"messages": [{"role": "user", "content": 3}]}, {"conversations": [{"from": "human"}]}, "also broken",
        {"conversations": [{"from": ["human"], "value": "x"}]}, {"messages": [{"role": "user", "content": "\ud83d"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        *({"messages": [chat(9)[0], {**chat(9)[1], **mark}]} for mark in ({"weight": 0.5}, {"train": "no"})),
    ]  # fmt: skip
    good = [{"messages": chat(n)} for n in range(100, 145)]
    path = write(tmp_path / "bad.jsonl", good + bad)
    with pytest.raises(
        ValueError,
        match=r"source 'bad': 25\.0% of 60 .* \(content 3, .* too_long 1, weight 2\); allowed are 5",
    ):
        run(replace(arguments, conversations=(str(path),)))
    assert not (arguments.out / "bad").exists()
    run(replace(arguments, conversations=(str(path),), max_dropped=0.3))
    found = manifest(arguments, "bad")
    assert found["dropped"] == {
        "content": 3, "empty": 1, "fields": 2, "no_reply": 1, "not_json": 2, "order": 1, "role": 2, "too_long": 1,
        "weight": 2,
    }  # fmt: skip
    assert found["read"] == found["kept"] + sum(found["dropped"].values()) == 60


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_what_the_user_excludes_is_context_and_not_trained(
    arguments: Arguments, tmp_path: Path, mark: dict[str, Any], form: str
) -> None:
    """Each conversation's first answer; the second one says explicitly what is the default."""
    rows = []
    for number in range(60):
        turns: list[dict[str, Any]] = chat(number, 2)  # type: ignore[assignment]
        turns[1] |= mark
        turns[3] |= dict.fromkeys(mark, 1)
        rows.append({form: turns if form == "messages" else [in_sharegpt(turn) for turn in turns]})
    rows += [{"messages": [question, {**answer, **mark}]} for question, answer in map(chat, range(60, 63))]
    # copies that exclude nothing, read before and after those that do
    rows = [{"messages": chat(0, 2)}, *rows, {"messages": chat(1, 2)}]
    path = write(tmp_path / "some.jsonl", rows)
    whole, trained = packed(replace(arguments, conversations=(str(path),), max_dropped=1), "some")
    assert manifest(arguments, "some")["dropped"] == {"duplicate": 2, "no_reply": 3}
    assert len(whole) > 30
    assert all(text.count("It is") == 2 for text in whole)
    assert all(text.count("It is") == 1 for text in trained)
    second = {f"It is {number + 1}." for number in range(60)}
    assert {text.replace("</s>", "").strip() for text in trained} <= second


def test_long_ones_keep_their_first_exchanges(arguments: Arguments, tmp_path: Path) -> None:
    path = write(tmp_path / "long.jsonl", [{"messages": chat(n, 1 + n % 5)} for n in range(50)])
    _, trained = packed(replace(arguments, conversations=(str(path),), cut_long=True), "long")
    assert manifest(arguments, "long")["dropped"] == {}
    assert manifest(arguments, "long")["cut"] == 20, "three exchanges fit, and two fifths have more"
    assert {text.count(".") for text in trained} == {1, 2, 3}
    assert all(text.endswith(".") for text in trained), "each ends with an answer"


def test_a_dataset_of_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple] = []
    given = [{"messages": chat(1)}]
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *names, **options: asked.append((*names, options)) or given
    )
    assert list(rows("org/some-data:train_sft")) == list(rows("org/some-data")) == given
    assert [(name, options["split"]) for name, options in asked] == [
        ("org/some-data", "train_sft"), ("org/some-data", "train"),
    ]  # fmt: skip

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        ValueError, match="org/some-data is no file, and the hub does not give such a dataset: no net"
    ):
        list(rows("org/some-data"))


def test_a_killed_worker_is_an_error(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel ends it when memory runs out; a pool of `multiprocessing` would wait forever."""

    def killing(origin: str) -> Iterator[Any]:
        yield from [{"messages": chat(1)}] * (2 * 16 * ROWS_AT_A_TIME)
        for worker in multiprocessing.active_children():
            worker.kill()
        yield {"messages": chat(1)}

    monkeypatch.setattr(conversations, "rows", killing)
    opened, special = open_tokenizer(tokenizer)
    with pytest.raises(ValueError, match="a worker was killed"):
        list(
            encode_all(
                "x", opened, {"chat_template": CHAT_TEMPLATE.read_text(), **special}, False, SEQ_LEN, False, 2
            )
        )


def test_sources_are_mixed_by_weight_and_the_same_conversation_is_held_out_of_all(
    arguments: Arguments, tmp_path: Path
) -> None:
    me = write(tmp_path / "me.jsonl", [{"messages": chat(n, 1 + n % 2)} for n in range(220)])
    sources = (*arguments.conversations, f"me={me}")
    both = replace(arguments, conversations=sources, weights=("me=3", "chat=1"))
    mixture = Mixture.open(run(both))
    assert dict(zip(mixture.source_names, mixture.weights, strict=True)) == {"chat": 1, "me": 3}
    assert set(held_out(both)[0]) <= set(held_out(both, "me")[0])
    by_size = json.loads(run(replace(both, weights=())).read_text())["sources"]
    assert {each["name"]: each["weight"] for each in by_size} == {
        each["name"]: each["windows"] for each in by_size
    }


def test_a_finished_source_is_kept_and_a_damaged_or_other_one_made_again(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = run(arguments).read_bytes()
    made: list[str] = []
    real = source._read
    monkeypatch.setattr(source, "_read", lambda *given: made.append("read") or real(*given))
    assert run(arguments).read_bytes() == lock
    assert not made
    path = arguments.out / "chat/shard-00000.flags.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-00000\.flags\.bin: block 0 of 1 .* is damaged"):
        Mixture.open(arguments.out / "sft.lock.json").flags(0, 1)
    assert run(arguments).read_bytes() == lock
    assert made == ["read"]
    run(replace(arguments, holdout=0.2))
    assert made == ["read", "read"]


def test_killed_while_writing_it_leaves_no_source_and_goes_on(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            source.shards, "write_json", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
        with pytest.raises(OSError, match="No space"):
            run(arguments)
    assert sorted(path.name for path in arguments.out.iterdir()) == [".chat.partial", ".sft.lock"]
    run(arguments)
    assert not (arguments.out / ".chat.partial").exists()
    assert (arguments.out / "sft.lock.json").is_file()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"conversations": ()}, "no conversations are given"),
        ({"conversations": ("missing.jsonl",)}, r"missing\.jsonl does not exist"),
        ({"conversations": ("notes.txt",)}, r"notes\.txt is no \.jsonl, \.jsonl\.gz or \.parquet file"),
        ({"conversations": ("A B=x.jsonl",)}, "the name 'A B' becomes a folder"),
        ({"weights": ("caht=1",)}, "unknown source in --weights 'caht'; did you mean 'chat'"),
        ({"weights": ("chat=x",)}, "source 'chat' needs an integer"),
        ({"holdout": 0.0}, r"--holdout 0\.0 must be from 0\.0001 to 0\.5"),
        ({"holdout": 0.0001}, "0 held out; both need at least one. Raise --holdout"),
        ({"seq_len": 4}, "--seq-len 4 must be from 16"),
        ({"max_dropped": 2.0}, "--max-dropped"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_sentence(arguments: Arguments, changes: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(replace(arguments, **changes))


@pytest.mark.job
def test_as_commands(tmp_path: Path, tokenizer: Path) -> None:
    """Identity conversations to a mixture, from the shell: the messages of both programs."""

    def command(*parts: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        given = [sys.executable, "-m", *parts]
        return subprocess.run(given, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)

    out = tmp_path / "identity.jsonl"
    assert command("train.sft.identity", "--out", str(out), "--conversations", "60").stdout.endswith(
        "60 conversations\n"
    )
    given = [str(out), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "data"), "--seq-len", "512"]
    done = command("train.sft", *given, "--holdout", "0.1", "--workers", "2")
    assert (
        "identity: 60 conversations read, 60 kept, 0 of them cut; 0 without their system message; dropped: none"
        in done.stdout
    ), done.stderr
    assert "sft.lock.json: identity 100.0%" in done.stdout
    refused = command("train.sft", *given, "--holdout", "0")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "error: --holdout 0.0 must be from 0.0001 to 0.5\n"
