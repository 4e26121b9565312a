"""The one command for a machine with the matrix unit: refused elsewhere by the flag, and whole on two other levels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laneformer.engine.cpu import _core
from tools.bench import amx
from tools.bench.__main__ import main
from tools.bench.decode import OURS


def runs(isa: str) -> bool:
    try:
        return bool(_core.isa_of(isa))
    except ValueError:
        return False


LEVELS = [isa for isa in ("avx512_bf16", "avx512", "avx2", "portable") if runs(isa)]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "flags : fpu avx2",
            r"isa = 'amx' cannot run here; .*, portable; this CPU lacks amx_tile, amx_bf16$",
        ),
        ("flags : fpu amx_tile", "this CPU lacks amx_bf16$"),
        ("flags : amx_tile amx_bf16", "the CPU has it, the system or this build does not$"),
    ],
)
def test_another_machine_is_refused_by_the_flag(
    flags: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runs("amx"):
        pytest.skip("this machine has the matrix unit")
    facts = tmp_path / "cpuinfo"
    facts.write_text(flags)
    monkeypatch.setattr(amx, "CPU_FACTS", facts)
    with pytest.raises(ValueError, match=says):
        amx.measure(amx.Options(), None)


@pytest.mark.rotate
def test_the_whole_command_on_two_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = LEVELS[-2:]
    page = tmp_path / "amx.md"
    arguments = [
        "--isa",
        first,
        second,
        "--flavor",
        "tiny",
        "--against",
        "",
        "--pairs",
        "1",
        "--new-tokens",
        "8",
    ]
    main(["amx", *arguments, "--threads", "1", "--prefill", "16", "--batch", "2", "--out", str(page)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    other = f"{OURS} isa={second}"
    names = [OURS, f"{OURS} math=exact", other, f"{other} math=exact"]
    assert list(result["candidates"]) == names
    for name, level, math in zip(names, (first, first, second, second), ("bf16", "exact") * 2, strict=True):
        assert result["candidates"][name]["about"].startswith(f"isa {level}, math {math}, ")
    for load in result["workloads"]:
        assert [(r["ours"], r["over"]) for r in load["ratios"]] == [
            (OURS, other), (f"{OURS} math=exact", f"{other} math=exact")
        ]  # fmt: skip
        assert all(r["figures"][name]["tokens_per_s"] > 0 for r in load["rounds"] for name in names)
    text = page.read_text()
    assert text.startswith("# The matrix unit (AMX) on CPU, in paired runs\n")
    assert f"| prompt of 16 | {OURS} | {other} | " in text
    assert "Probe: " in text


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"isa = 'sse9' cannot run here; this CPU and this build have: auto, "
    ):
        amx.check_here(["sse9"])
