"""Names in the Hugging Face folder are ours with `model.` in front, but for the head; shapes are the same."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from ..config import hf_name, plain_name


class LaneformerStateDictAdapter(StateDictAdapter):
    """Lets TorchTitan's own checkpointer write and read Hugging Face safetensors."""

    def __init__(self, model_args: BaseModelArgs, hf_assets_path: str | None):
        super().__init__(model_args, None)  # one safetensors file; hf/export.py writes complete, sharded folders

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {hf_name(name): value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {plain_name(name): value for name, value in hf_state_dict.items()}
