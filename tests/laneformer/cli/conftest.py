"""A small model that talks, for the commands that hold conversations."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from laneformer import Laneformer
from tests.laneformer.engine.assets import byte_tokenizer, random_model, small_config, write_folder

BEGIN = 266
END = 267
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role[0] + '\n' + m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>a\n{% endif %}"
)


def tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["c", "d", "e", "f"])
    tokenizer.add_special_tokens(
        [AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True)]
    )
    assert tokenizer.token_to_id("<|end|>") == END
    return tokenizer


def talker(path: Path, model: Laneformer) -> Path:
    """Return the folder of a model that a chat template makes talk."""
    write_folder(path, model, eos_token_id=END)
    tokenizer().save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "generation_config.json").write_text('{"do_sample": false}')
    return path


@pytest.fixture(scope="session")
def folder(shared):
    # one id in 268 ends its message
    config = small_config(vocab_size=268, max_position_embeddings=4096)
    return shared("talker", lambda folder: talker(folder, random_model(config)))
