"""A model whose control tokens and template are gpt-oss's."""

from importlib.resources import files
from pathlib import Path

from laneformer.engine.channels import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START
from tests.laneformer.serve.conftest import write_model

CONTROL = [*ENDS, START, CHANNEL, CONSTRAIN, MESSAGE]
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
ARGUMENTS = '{"city": "Rome"}'
HELLO = [{"role": "user", "content": "Hello"}]
ROME = [{"role": "user", "content": "How warm is it in Rome?"}]
GPT_OSS = (files("trl") / "chat_templates" / "gptoss.jinja").read_text()


def harmony_folder(folder) -> Path:
    return write_model(folder, CONTROL, GPT_OSS, ENDS[1:], max_position_embeddings=512)
