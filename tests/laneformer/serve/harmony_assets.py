"""A model whose tokenizer and template are gpt-oss's in form."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from laneformer.engine.channels import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START

CONTROL = [*ENDS, START, CHANNEL, CONSTRAIN, MESSAGE]


def gpt_oss_template() -> str:
    return (files("trl") / "chat_templates" / "gptoss.jinja").read_text()


def harmony_folder(model: Path, to: Path) -> Path:
    """The model with the tokens of the format in place of the last pieces of its vocabulary, and gpt-oss's
    template.
    """
    shutil.copytree(model, to)
    described = json.loads((to / "tokenizer.json").read_text())
    vocab, merges = described["model"]["vocab"], described["model"]["merges"]
    pieces = sorted(vocab, key=vocab.__getitem__)[-len(CONTROL) :]
    ids = [vocab.pop(piece) for piece in pieces]
    kept_merges = [pair for pair in merges if not {*pieces} & {*pair, "".join(pair)}]
    described["model"]["merges"] = kept_merges
    vocab |= dict(zip(CONTROL, ids, strict=True))
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    assert [tokenizer.token_to_id(name) for name in CONTROL] == ids
    tokenizer.save(str(to / "tokenizer.json"))
    config = json.loads((to / "tokenizer_config.json").read_text())
    config["chat_template"] = gpt_oss_template()
    (to / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [tokenizer.token_to_id(name) for name in ENDS[1:]]
    (to / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": ends}))
    return to
