"""What the demo says about its conversations, against the plain PyTorch model
and the conversations themselves.
"""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F

from laneformer import Laneformer
from laneformer.hf.tokenizer import write_tokenizer
from laneformer.model import KVCache
from tests.laneformer.engine.assets import write_folder
from tests.laneformer.hf.hf_assets import random_model
from tests.tokenizer_assets import encode_chat
from tests.train.sft import chats
from tools import demo

Conversations = list[tuple[list[int], torch.Tensor]]


@pytest.fixture(scope="module")
def folder(prepared_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("hf")
    write_tokenizer(prepared_data / "tokenizer.model", out, 512)
    return write_folder(out, model(), eos_token_id=2)


def model() -> Laneformer:
    return random_model(vocab_size=512)


@pytest.fixture(scope="module")
def conversations(prepared_data, tmp_path_factory):
    lock = chats.prepare(tmp_path_factory.mktemp("chat"), prepared_data / "tokenizer.model", 60)
    return demo.read_held_out_conversations(lock.parent, "identity")


def test_held_out_conversations_are_whole(conversations, folder):
    known = {
        tuple(ids): mask
        for ids, mask in (encode_chat(folder, one) for one in chats.conversations(60))
    }
    assert len(conversations) > 2
    assert all(known[tuple(ids)] == said.tolist() for ids, said in conversations)


@torch.no_grad()
def greedy(plain: Laneformer, prompt: list[int], count: int) -> list[int]:
    cache, new, feed = KVCache(plain.config.num_hidden_layers), [], prompt
    for _ in range(count):
        new.append(int(plain(torch.tensor([feed]), cache)[0, -1].argmax()))
        feed = new[-1:]
    return new


@torch.no_grad()
def test_figures(conversations, folder, tmp_path, monkeypatch):
    plain, asked = model(), conversations[:8]
    losses = []
    for ids, said in asked:
        of_all = F.cross_entropy(
            plain(torch.tensor([ids]))[0, :-1], torch.tensor(ids[1:]), reduction="none"
        )
        losses.append(of_all[torch.from_numpy(said[1:])])
    replies = [greedy(plain, ids[: said.tolist().index(True)], 12) for ids, said in asked]
    end = replies[0][-1]  # a random model ends no reply; this token ends some
    ended = sum(end in reply for reply in replies)
    assert 0 < ended < len(replies)
    monkeypatch.setattr(demo, "REPLY_TOKENS", 12)
    shutil.copytree(folder, tmp_path / "hf")
    figures = demo.chat_figures(
        folder, write_folder(tmp_path / "hf", plain, eos_token_id=end), asked
    )
    assert figures["chat_loss_before"] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-3)
    assert figures["chat_loss_after"] == figures["chat_loss_before"]
    assert (figures["replies"], figures["replies_ended"]) == (len(asked), ended)
