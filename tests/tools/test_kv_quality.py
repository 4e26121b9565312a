"""The table of types of keys and values, on a random model whose context is short."""

from __future__ import annotations

from pathlib import Path

import pytest

from laneformer.engine.decoder import KV_BYTES
from tests.laneformer.serve.conftest import write_model
from tools.kv_quality import Options, main


@pytest.mark.rotate
def test_every_type_beside_fp32(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", max_position_embeddings=1024)
    (tmp_path / "text.txt").write_text("The sea was calm, and the ship went on. " * 400)
    page = tmp_path / "page.md"
    options = Options(
        model, tmp_path / "text.txt", context_tokens=1024, needles=1, new_tokens=4, threads=1, out=page
    )
    main(options)
    titles, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines()
    ]
    found = {row[0]: dict(zip(titles, row, strict=True)) for row in rows}
    assert found.keys() == KV_BYTES.keys()
    moved = {kind: float(row["moved at a token, mean"]) for kind, row in found.items()}
    assert moved["fp32"] == 0 < moved["int8"] < 0.1
    sizes = {kind: int(row["bytes a position"].replace(",", "")) for kind, row in found.items()}
    assert sizes["int8"] < sizes["fp16"] == sizes["bf16"] == sizes["fp32"] // 2
    assert all(
        row[f"needles in {length:,}"] == "0 of 1" for row in found.values() for length in (256, 512, 1024)
    )


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", max_position_embeddings=1024)
    (tmp_path / "text.txt").write_text("short")
    with pytest.raises(ValueError, match="--windows 2 need 2048"):
        main(Options(model, tmp_path / "text.txt", context_tokens=1024, threads=1))
