"""OpenVINO on GGUF files, as its own reader converts them, with its own choice of precisions."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from laneformer import LaneformerConfig
from tools.bench.baselines import Baseline
from tools.bench.llamacpp import CACHE_FOLDER, as_gguf, sizes_of, write_once

FOLDER = Path(sys.prefix) / "openvino"


class OpenVino(Baseline):
    """The stateful model of openvino-genai, asked for logits id by id; it rounds as it likes."""

    ways = ("its own choice",)

    def __init__(
        self, source: LaneformerConfig | Path, kind: str, threads: int, context: int | None
    ):
        super().__init__()
        sys.path.append(str(FOLDER))
        import openvino

        path = as_gguf(source, kind)
        _, self.cache_width, self.weight_bytes, _ = sizes_of(path)
        model = write_once(
            CACHE_FOLDER / "openvino" / path.stem, lambda folder: convert(path, folder)
        )
        network = openvino.Core().read_model(model / "openvino_model.xml")
        multiply_last_alone(network)
        compiled = openvino.compile_model(
            network,
            "CPU",
            {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"},
        )
        self.request, self.length = compiled.create_infer_request(), 0
        self.version = f"OpenVINO {openvino.__version__.partition('-')[0]}"
        chosen = (
            "INFERENCE_PRECISION_HINT",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE",
            "KV_CACHE_PRECISION",
        )
        self.about = f"{path.name}; " + ", ".join(
            f"{name} {compiled.get_property(name)}" for name in chosen
        )

    def rewind(self, way: str, length: int) -> None:
        """It forgets all or nothing, so the beginning of a prompt is read again."""
        if length:
            self.rewind(way, 0)
            self.evaluate(way, self.prompts[way][:length])
        else:
            self.request.reset_state()
            self.length = 0

    def evaluate(self, way: str, ids: list[int]) -> int:
        end = self.length + len(ids)
        self.request.infer(
            {
                "input_ids": np.array([ids]),
                "attention_mask": np.ones((1, end), np.int64),
                "position_ids": np.arange(self.length, end)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        self.length = end
        return int(self.request.get_output_tensor(0).data[0, -1].argmax())

    def count_cached_bytes(self, positions: int) -> int:
        return self.cache_width * positions  # a byte each


def multiply_last_alone(network) -> None:
    """Give the head the last position alone, as LLMPipeline does: a prompt asks for no other logits."""
    from openvino import opset13 as ops

    head = network.get_results()[0].input_value(0).get_node()
    last = ops.slice(head.input_value(0), *np.array([[-1], [2**31 - 1], [1], [1]]))
    head.input(0).replace_source_output(last.output(0))
    network.validate_nodes_and_infer_types()


def convert(path: Path, folder: Path) -> None:
    """Convert a GGUF file; the reader writes its model beside the file it is given."""
    import openvino_genai

    folder.mkdir()
    copy = folder / path.name
    copy.symlink_to(path)
    openvino_genai.LLMPipeline(copy, "CPU", enable_save_ov_model=True)
