"""Tests of `python -m train.sft`: its output is counted, deduplicated, held out, restartable."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
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
from records.files import read_json
from tests.train.runs import ROOT
from train.sft import conversations, source
from train.sft.__main__ import Arguments, run
from train.sft.conversations import ROWS_AT_A_TIME, NumberedRow, encode_all, rows

SEQ_LEN = 256
Turn = dict[str, Any]


def chat(number: int, turns: int = 1) -> list[Turn]:
    return [
        {"role": role, "content": text}
        for turn in range(turns)
        for role, text in (
            ("user", f"What is {number} + {turn}?"),
            ("assistant", f"It is {number + turn}."),
        )
    ]


CHATS = [chat(n, 1 + n % 2) for n in range(120)]


def write(path: Path, rows: list) -> Path:
    lines = "".join(
        (row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows
    ).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def with_messages(chats: list[list[Turn]]) -> list[Turn]:
    return [{"messages": turns} for turns in chats]


@pytest.fixture(scope="module")
def tokenizer(data_folder):
    return data_folder / "tokenizer.model"


@pytest.fixture
def arguments(tmp_path, tokenizer):
    path = write(tmp_path / "chat.jsonl", with_messages(CHATS))
    return Arguments(
        (str(path),), tokenizer, tmp_path / "out", seq_len=SEQ_LEN, holdout=0.1, workers=1
    )


@pytest.fixture
def prepare(arguments, tmp_path):
    # with other rows than the fixture's; returns the manifest
    def prepare(rows, **changes):
        path = write(tmp_path / "chat.jsonl", rows)
        run(replace(arguments, conversations=(str(path),), **changes))
        return manifest(arguments)

    return prepare


def manifest(arguments: Arguments) -> dict[str, Any]:
    return read_json(arguments.out / "chat/source.json")


def texts(windows: np.ndarray, flags: np.ndarray, tokenizer: Path) -> tuple[list[str], list[str]]:
    # the conversations in some windows, whole and only what is trained, without padding
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    whole, trained = [], []
    for window, marks in zip(windows[:, :-1].tolist(), flags[:, :-1].tolist(), strict=True):
        begins = [i for i, mark in enumerate(marks) if mark & BEGINS] + [len(window)]
        for begin, end in itertools.pairwise(begins):
            if window[begin]:
                whole.append(sp.decode(window[begin:end]))
                trained.append(
                    sp.decode([window[i] for i in range(begin, end) if marks[i] & TRAINED])
                )
    return whole, trained


def read_valid(arguments: Arguments, name: str = "chat") -> tuple[list[str], list[str]]:
    windows, flags = (valid_windows(arguments.out, name, flags=flags) for flags in (False, True))
    return texts(windows, flags, arguments.tokenizer)


def read_train(arguments: Arguments) -> tuple[list[str], list[str]]:
    mixture, count = Mixture.open(arguments.out / "sft.lock.json"), manifest(arguments)["windows"]
    return texts(mixture.sequences(0, count)[0], mixture.flags(0, count), arguments.tokenizer)


def test_every_conversation_is_trained_or_held_out_and_only_answers_count(arguments):
    run(arguments)
    (whole, trained), (whole_held, trained_held) = read_train(arguments), read_valid(arguments)
    assert 3 <= len(whole_held) <= 30
    assert not set(whole) & set(whole_held)
    assert len(whole) + len(whole_held) == 120
    answers = ["".join(m["content"] for m in turns if m["role"] == "assistant") for turns in CHATS]
    assert sorted(text.replace("</s>", "") for text in trained + trained_held) == sorted(answers)
    assert "<|start_header_id|>" not in "".join(trained)


def in_sharegpt(turn: Turn) -> Turn:
    names = {"user": "human", "assistant": "gpt"}
    rest = {key: value for key, value in turn.items() if key not in ("role", "content")}
    return {"from": names[turn["role"]], "value": turn["content"], **rest}


def test_one_text_gives_the_same_bytes_in_any_order_and_form_and_from_any_workers(
    arguments, tmp_path
):
    # Shuffled with copies, as ShareGPT's turns, in Parquet, in text parts; and behind system
    # messages, which the template ignores, also where the model is served.
    parts = [
        [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        for turns in CHATS
    ]
    system = [
        [{"role": ("system", "developer")[n % 2], "content": "Be brief."}, *turns]
        for n, turns in enumerate(CHATS)
    ]
    share = [{"conversations": [*map(in_sharegpt, turns)], "id": 3} for turns in CHATS]
    pyarrow.parquet.write_table(pyarrow.table({"messages": CHATS}), tmp_path / "rows.parquet")
    variants: dict[Path, dict[str, Any]] = {
        write(tmp_path / "again.jsonl.gz", with_messages(CHATS[60:] + CHATS[:67])): {
            "dropped": {"duplicate": 7}
        },
        write(tmp_path / "share.jsonl", share): {},
        tmp_path / "rows.parquet": {},
        write(tmp_path / "parts.jsonl", with_messages(parts)): {},
        write(tmp_path / "system.jsonl", with_messages(system)): {"system_ignored": 120},
    }
    assert json.loads(run(arguments).read_text())["packing"] == "conversations"
    for path, counts in variants.items():
        workers = 2 if path.suffix == ".gz" else 1
        other = replace(
            arguments, conversations=(f"chat={path}",), out=tmp_path / path.stem, workers=workers
        )
        run(other)
        for name in ("shard-00000.bin", "shard-00000.flags.bin", "valid.bin", "valid.flags.bin"):
            assert (other.out / "chat" / name).read_bytes() == (
                arguments.out / "chat" / name
            ).read_bytes(), path
        expected = {"dropped": {}, "system_ignored": 0, **counts}
        assert {key: manifest(other)[key] for key in expected} == expected


def test_what_cannot_be_used_is_counted_by_reason(prepare, arguments):
    bad = [
        "{broken",
        {"text": "x"},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": chat(1)[1:]},
        {"messages": [{"role": "user", "content": " "}]},
        {"messages": chat(1)[:1]},
        {"messages": chat(5, 40)},
        {"messages": [{"role": "user", "content": 3}]},
        {"conversations": [{"from": "human"}]},
        "also broken",
        {"conversations": [{"from": ["human"], "value": "x"}]},
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        *(
            {"messages": [chat(9)[0], {**chat(9)[1], **mark}]}
            for mark in ({"weight": 0.5}, {"train": "no"})
        ),
    ]
    rows = with_messages([chat(n) for n in range(100, 145)]) + bad
    says = (
        r"source 'chat': 25\.0% of 60 .* \(content 3 \(2\.0% of the bytes, .*/chat\.jsonl, row 53: message 0 has "
        r"content of type int.*; not_json 2 \(0\.2% of the bytes, .*chat\.jsonl, row 46: the line is not JSON\);.*"
        r"too_long 1 \(39\.5% of the bytes, .*weight 2 .*\); allowed are 5"
    )
    with pytest.raises(ValueError, match=says):
        prepare(rows)
    assert not (arguments.out / "chat").exists()
    counts = prepare(rows, max_dropped=0.3)
    assert counts["dropped"] == {
        "content": 3,
        "empty": 1,
        "fields": 2,
        "no_reply": 1,
        "not_json": 2,
        "order": 1,
        "role": 2,
        "too_long": 1,
        "weight": 2,
    }
    assert counts["read"] == counts["kept"] + sum(counts["dropped"].values()) == 60


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_what_the_user_excludes_is_context_and_not_trained(prepare, arguments, mark, form):
    # Each conversation's first answer; the second one says explicitly what is the default.
    rows = []
    for number in range(60):
        turns = chat(number, 2)
        turns[1] |= mark
        turns[3] |= dict.fromkeys(mark, 1)
        rows.append({form: turns if form == "messages" else [in_sharegpt(turn) for turn in turns]})
    rows += with_messages(
        [[question, {**answer, **mark}] for question, answer in map(chat, range(60, 63))]
    )
    # copies that exclude nothing, read before and after those that do
    copies = with_messages([chat(0, 2), chat(1, 2)])
    counts = prepare([copies[0], *rows, copies[1]], max_dropped=1)
    assert counts["dropped"] == {"duplicate": 2, "no_reply": 3}
    whole, trained = read_train(arguments)
    assert len(whole) > 30
    assert all(text.count("It is") == 2 for text in whole)
    assert all(text.count("It is") == 1 for text in trained)
    second = {f"It is {number + 1}." for number in range(60)}
    assert {text.replace("</s>", "").strip() for text in trained} <= second


def test_a_dataset_of_the_hub_is_streamed(monkeypatch):
    import datasets

    def load_dataset(name, split, streaming):
        if name == "org/away":
            raise ConnectionError("no network")
        return [[name, split, streaming]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for origin, split in (("org/data:train_sft", "train_sft"), ("org/data", "train")):
        assert [row[:2] for row in rows(origin)] == [(1, ["org/data", split, True])]
    with pytest.raises(
        ValueError, match="org/away is no file, and the hub does not give such a dataset: no net"
    ):
        list(rows("org/away"))


def test_a_killed_worker_is_an_error(tokenizer, monkeypatch):
    # As the kernel ends it when memory runs out; a pool of `multiprocessing` would wait forever.

    def killing(origin):
        row = NumberedRow(1, {"messages": chat(1)}, 1)
        yield from [row] * (2 * 16 * ROWS_AT_A_TIME)
        for worker in multiprocessing.active_children():
            worker.kill()
        yield row

    monkeypatch.setattr(conversations, "rows", killing)
    opened, special = open_tokenizer(tokenizer)
    template = {"chat_template": CHAT_TEMPLATE.read_text(), **special}
    with pytest.raises(ValueError, match="a worker was killed"):
        list(encode_all("x", opened, template, (False, SEQ_LEN, False), 2))


def test_sources_are_mixed_by_weight_and_the_same_conversation_is_held_out_of_all(
    arguments, tmp_path
):
    me = write(tmp_path / "me.jsonl", with_messages([chat(n, 1 + n % 2) for n in range(220)]))
    both = replace(
        arguments, conversations=(*arguments.conversations, f"me={me}"), weights=("me=3", "chat=1")
    )
    mixture = Mixture.open(run(both))
    assert dict(zip(mixture.source_names, mixture.weights, strict=True)) == {"chat": 1, "me": 3}
    assert set(read_valid(both)[0]) <= set(read_valid(both, "me")[0])
    by_size = json.loads(run(replace(both, weights=())).read_text())["sources"]
    assert [entry["weight"] for entry in by_size] == [entry["windows"] for entry in by_size]


def test_a_finished_source_is_kept_and_a_damaged_or_other_one_made_again(arguments, monkeypatch):
    lock, reads, read = run(arguments).read_bytes(), list[str](), source._read
    monkeypatch.setattr(source, "_read", lambda *all: reads.append("read") or read(*all))
    assert run(arguments).read_bytes() == lock
    assert not reads
    path = arguments.out / "chat/shard-00000.flags.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-00000\.flags\.bin: block 0 of 1 .* is damaged"):
        Mixture.open(arguments.out / "sft.lock.json").flags(0, 1)
    assert run(arguments).read_bytes() == lock
    assert reads == ["read"]
    run(replace(arguments, holdout=0.2))
    assert reads == ["read", "read"]


def test_killed_while_writing_it_leaves_no_source_and_goes_on(arguments, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr(source.shards, "write_json", fail)
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
        (
            {"conversations": ("notes.txt",)},
            r"notes\.txt is no \.jsonl, \.jsonl\.gz or \.parquet file",
        ),
        ({"conversations": ("A B=x.jsonl",)}, "the name 'A B' becomes a folder"),
        ({"conversations": ("data/lang=en/x.jsonl",)}, r"data/lang=en/x\.jsonl does not exist"),
        ({"conversations": ("configs",)}, r"configs holds no \.jsonl, \.ndjson, \.parquet file"),
        (
            {"conversations": ("me=~/nowhere.jsonl",)},
            rf"{Path.home()}/nowhere\.jsonl does not exist",
        ),
        ({"weights": ("caht=1",)}, "unknown source in --weights 'caht'; did you mean 'chat'"),
        ({"weights": ("chat=x",)}, "source 'chat' needs an integer"),
        ({"max_dropped": 2.0}, "--max-dropped"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_sentence(arguments, changes, says):
    with pytest.raises(ValueError, match=says):
        run(replace(arguments, **changes))


def test_a_path_is_taken_as_it_is(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("lang=en/x.JSONL", "a=b.jsonl.GZ", "~/chat.jsonl"):
        path = Path(name).expanduser() if name.startswith("~") else tmp_path / name
        path.parent.mkdir(exist_ok=True)
        lines = write(tmp_path / "given.jsonl", with_messages(CHATS)).read_bytes()
        path.write_bytes(gzip.compress(lines) if name.endswith("GZ") else lines)
        origin = f"me={name}" if name.startswith("~") else str(path)
        assert run(
            replace(arguments, conversations=(origin,), out=tmp_path / f"out-{path.name}")
        ).is_file()


def test_a_folder_is_its_files_and_the_holdout_that_is_advised_suffices(arguments, tmp_path):
    folder = tmp_path / "chat"
    for number in range(3):
        name = f"{'ab'[number % 2]}/{number}.jsonl"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, with_messages(CHATS[number * 40 : number * 40 + 40]))
    (folder / "dataset_infos.json").write_text('{"features": {}}')
    one = replace(arguments, conversations=(str(folder),), holdout=0.0001)
    with pytest.raises(ValueError, match="holds one out") as refused:
        run(one)
    (holdout,) = re.findall(r"--holdout (\S+) holds one", str(refused.value))
    run(replace(one, holdout=float(holdout)))
    assert len(read_valid(one)[0]) == 1
    assert manifest(one)["read"] == len(CHATS)


@pytest.mark.job
def test_as_commands(tmp_path, tokenizer):
    # Identity conversations to a mixture, from the shell: the messages of both programs.

    def command(*parts):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", *parts],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )

    out = str(tmp_path / "identity.jsonl")
    identity = command("train.sft.identity", "--out", out, "--conversations", "60")
    assert identity.stdout.endswith("60 conversations\n")
    flags = [
        out,
        "--tokenizer",
        str(tokenizer),
        "--out",
        str(tmp_path / "data"),
        "--seq-len",
        "512",
    ]
    packed = command("train.sft", *flags, "--holdout", "0.1", "--workers", "2")
    counts = "60 conversations read, 60 kept, 0 of them cut; 0 without their system message; dropped: none"
    assert f"identity: {counts}" in packed.stdout, packed.stderr
    assert "sft.lock.json: identity 100.0%" in packed.stdout
    refused = command("train.sft", *flags, "--holdout", "0")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert (
        refused.stderr == "train.sft: --holdout 0.0: it should be greater than or equal to 0.0001\n"
    )
