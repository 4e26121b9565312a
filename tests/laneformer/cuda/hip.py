"""The kernels as machine code for AMD's gfx942, by a clang that has the target, without ROCm."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess

from laneformer.engine.cuda.compile import INCLUDES

CLANG = shutil.which("clang-22")
COMMAND = (
    "-x", "hip", "--cuda-device-only", "--offload-arch=gfx942", "-nogpulib", "-nogpuinc", "-nostdinc",
    "-std=c++17", "-O3", "-fno-math-errno", "-Werror", "-S", "-o", "-", "-",
)  # fmt: skip


@functools.cache
def machine_code(source: str) -> str:
    """Assembly text; RuntimeError with what the compiler says, warnings too."""
    assert CLANG
    folders = [f"-I{folder}" for folder in INCLUDES]
    table = "-DTABLE=__attribute__((constant)) constexpr"
    done = subprocess.run([CLANG, *COMMAND, *folders, table], input=source, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def noted(code: str, name: str) -> list[int]:
    """What the compiler notes of each kernel, such as vgpr_count."""
    return [int(number) for number in re.findall(rf"^ +\.{name}: +(\d+)$", code, re.MULTILINE)]


def of_kernel(code: str, name: str) -> str:
    return code.split(f"\n{name}:")[1].split("s_endpgm")[0]


def instructions(code: str, pattern: str) -> list[str]:
    """The instructions whose text has a match."""
    return [
        line.strip() for line in code.splitlines() if re.match(r"\t\w", line) and re.search(pattern, line)
    ]


def loops(code: str, depth: int) -> list[str]:
    """Each loop of this depth with all that it holds, by the compiler's comments."""
    found: dict[str, str] = {}
    outer: dict[str, str] = {}
    for block in re.split(r"^(?=\.LBB\d+_\d+:|; %bb)", code, flags=re.MULTILINE):
        label = block.split(":", 1)[0].removeprefix(".L")
        place = "\n".join(line for line in block.splitlines() if ";" in line)
        parents = {int(level): name for name, level in re.findall(r"Parent Loop (\w+) Depth=(\d+)", place)}
        own = re.search(r"Loop Header: Depth=(\d+)", place)
        inside = re.search(r"in Loop: Header=(\w+) Depth=(\d+)", place)
        if own:
            outer[label] = parents.get(depth, label if int(own[1]) == depth else "")
        if loop := outer.get(label if own else inside[1] if inside else "", ""):
            found[loop] = found.get(loop, "") + block
    return list(found.values())
