"""Tests of the source's import arrows, and of tools.check.structure on planted violations."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.tools.launch.launch_assets import commit, git
from tools.check import structure
from tools.check.imports import (
    Edge,
    find_circles,
    find_edges,
    find_folder_edges,
    find_forbidden_edges,
    list_imports,
    list_modules,
    package_of,
)

ROOT = Path(__file__).resolve().parents[1]
# inside laneformer: what a part may use of the others (circles are forbidden besides)
PLAIN = {"ropes", "supports", "config", "joins", "tensors", "old_spellings", "flops"}
LAYERS = {"cache", "initialization", "lanes", "mtp", "positions"}
INSIDE = {
    **dict.fromkeys(PLAIN, PLAIN),
    **{part: {"config", "joins", "ropes", *LAYERS} for part in (*LAYERS, "model")},
    "llama": PLAIN | LAYERS | {"model"},
    "hf": PLAIN | LAYERS | {"llama", "model"},
    "titan": {"config", "flops", "joins", "model", "supports"} | LAYERS,
    "chat": {"config"},
    "prompts": {"chat"},
    "engine": PLAIN | {"llama"},
    "engine/cuda": {"config", "engine", "joins", "model", "positions", "tensors"},
    "serve": {"chat", "config", "engine", "prompts"},
    "cli": {"chat", "config", "engine", "prompts", "serve", "tensors"},
}
ONLY_IN = {
    "torchtitan": {"titan"},
    "transformers": {"hf"},
    "torch": LAYERS
    | {"model", "llama/layers.py", "hf", "titan", "engine/cuda", "engine/device.py"},
}


def plant(root: Path, files: dict[str, str]) -> set[Edge]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return find_edges(root)


def test_nobody_imports_a_second_copy_of_laneformer():
    assert len(list_modules(ROOT)) > 100
    assert len(find_edges(ROOT)) > 200
    for module, path in list_modules(ROOT).items():
        names = [
            name for name, _ in list_imports(ast.parse(path.read_text()), package_of(module, path))
        ]
        assert not any(name.startswith("models.") for name in names), path


def test_arrows_inside_laneformer():
    folder = ROOT / "models/laneformer"
    for module, path in list_modules(ROOT).items():
        parts = path.relative_to(folder).parts if path.is_relative_to(folder) else ("__init__.py",)
        part = "engine/cuda" if parts[:2] == ("engine", "cuda") else parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        package = package_of(module, path)
        names = [
            f"{target}.{name}"
            for target, name in list_imports(ast.parse(path.read_text()), package)
        ]
        used = {name.split(".")[1] for name in names if name.startswith("laneformer.")} - {
            part,
            parts[0],
        }
        used = {
            name for name in used if (folder / name).is_dir() or (folder / f"{name}.py").is_file()
        }
        assert used <= INSIDE[part], f"{'/'.join(parts)} imports {used - INSIDE[part]}"
        for library, allowed in ONLY_IN.items():
            if any(name.split(".")[0] == library for name in names):
                assert {part, "/".join(parts)} & allowed, f"{'/'.join(parts)} imports {library}"


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"train/a.py": "def f():\n    from evals import b\n"}, "train.a imports evals.b"),
        ({"train/a.py": "run([python, '-m', 'evals.b'])"}, "train.a names evals.b"),
        ({"train/a.py": "COMMAND = 'evals.b'"}, "train.a names evals.b"),
        ({"train/a.py": "run(f'evals.{name}')"}, "train.a names evals"),
        ({"models/laneformer/x/a.py": "from records import c"}, "laneformer.x.a imports records"),
        ({"data_mixtures/a.toml": 'reader = "evals.b:read"\n'}, "data_mixtures names evals.b"),
        ({"evals/a.py": "run(['-m', 'tools'])"}, "evals.a names tools.__main__"),
        ({"train/a.py": "run('-m', 'evals.watch')", "evals/watch.py": ""}, None),
        ({"train/a.py": "import evals.watch", "evals/watch.py": ""}, "train.a imports evals.watch"),
        (
            {"train/a.py": "'''Read by `python -m evals.b`.'''\nERROR = 'run python -m evals.b'"},
            None,
        ),
    ],
)
def test_planted_arrows_are_found(tmp_path, files, fault):
    ground = {
        "evals/__init__.py": "",
        "evals/b.py": "",
        "tools/__init__.py": "",
        "tools/__main__.py": "",
    }
    assert find_forbidden_edges(plant(tmp_path, ground | files)) == [fault][: fault is not None]


CHAIN = {"tools/a.py": "from . import b", "tools/b.py": "from .c import x", "tools/c.py": ""}
THREE = ["tools.a", "tools.b", "tools.c"]
FOLDERS = {"tools/p/a/x.py": "import tools.p.b.y", "tools/p/b/y.py": "", "tools/p/b/z.py": ""}


@pytest.mark.parametrize(
    ("files", "of_modules", "of_folders"),
    [
        (CHAIN, [], []),
        (CHAIN | {"tools/c.py": "run('-m', 'tools.a')"}, [THREE], [THREE]),
        # a process that starts itself again
        (CHAIN | {"tools/c.py": "import tools.c"}, [], []),
        (FOLDERS, [], []),
        (FOLDERS | {"tools/p/b/z.py": "import tools.p.a.x"}, [], [["tools.p.a", "tools.p.b"]]),
    ],
)
def test_planted_circles_are_found(tmp_path, files, of_modules, of_folders):
    edges = plant(tmp_path, files)
    assert find_circles(edges) == of_modules
    assert find_circles(find_folder_edges(edges)) == of_folders


def commit_sizes(root: Path, sizes: dict[str, int]) -> None:
    path = root / structure.SIZE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(sizes, indent=2) + "\n")
    git(root, "init", "-q")
    commit(root, "sizes")


def test_the_ratchet_holds_the_smallest_size_that_history_has_seen(tmp_path):
    name = "python_tokens_of_source"
    sizes = {name: 1000, "python_tokens_of_tests_and_examples": 0, "native_lines": 0}
    commit_sizes(tmp_path, sizes)
    commit_sizes(tmp_path, sizes | {name: 400})
    # who needs room edits the file
    commit_sizes(tmp_path, sizes | {name: 2000})
    source = tmp_path / "records/a.py"
    source.parent.mkdir()
    for tokens, ok in ((405, True), (408, False)):
        source.write_text("x = 1\n" * (tokens // 3))
        row = {row.name: row for row in structure.measure_sizes(tmp_path)}[
            "python tokens of source"
        ]
        assert (row.value, row.limit, row.ok) == (tokens, 406, ok)
    shutil.rmtree(tmp_path / ".git")
    assert structure.read_smallest_sizes(tmp_path)[name] == 2000, "a tarball has the file alone"


def test_sizes_count_source_tests_and_native_lines_apart(tmp_path):
    texts = {
        "train/a.py": 'x = f(1, "a")\n',
        "tests/b.py": "x = 1\n",
        "examples/c.py": "y = 2\n",
        "models/laneformer/d.cu": "//\n//\n",
        "tests/e.h": "//\n",
        "records/f.js": "x\n",
        "train/g.md": "z\n",
    }
    plant(tmp_path, texts)
    assert list(structure.count_sizes(tmp_path).values()) == [8, 6, 3]


def test_tokens_are_what_a_reader_has_to_read():
    # x = f(1, "a") has eight tokens: neither layout nor prose counts
    code = 'x = f(1, "a")\n'
    function = f'"""Module."""\n\n\ndef g():\n    """Function."""\n    # why\n    {code}\n'
    assert structure.count_tokens(code) == 8
    assert structure.count_tokens(function) == 8 + len(["def", "g", "(", ")", ":"])
    assert structure.count_tokens(code.replace(", ", ",  \\\n    ")) == 8


def test_long_files_functions_and_classes_are_found(tmp_path):
    line = "        x = 1\n"
    texts = {
        "train/a.py": "class A:\n    def f():\n" + line * 300,
        "train/b.py": "def g():\n" + line[4:] * 59,
        "train/c.cu": "void h(int n) {\n" + "  run([] { return 1; });\n" * 60 + "}\nvoid h() {}\n",
    }
    plant(tmp_path, texts)
    excess = {row.name: row.excess for row in structure.measure_lengths(tmp_path)}
    assert excess == {
        "lines of the longest file": [],
        "lines of the longest kernel file": [],
        "lines of the longest function": ["train/a.py :2 f: 301", "train/c.cu :1 h: 62"],
        "lines of the longest class": ["train/a.py :1 A: 302"],
    }


def test_private_names_of_torch_stand_in_one_file():
    # not torch.ops: operators, which the policy of checkpoints names
    # a new version may move them; torch's own clipping of gradients calls `torch._foreach_norm`
    private = re.compile(r"torch(?!\.ops\.)(?:\.[a-z]\w*)*\._[a-z]\w*")
    names: dict[str, set[str]] = {}
    for path in (*ROOT.glob("models/laneformer/**/*.py"), *ROOT.glob("train/**/*.py")):
        if matches := private.findall(path.read_text()):
            names[path.relative_to(ROOT).as_posix()] = set(matches)
    assert len(names.pop("models/laneformer/titan/private_torch.py")) == 4
    assert names == {
        "train/diagnostics.py": {"torch._foreach_norm"},
        "train/job_config.py": {"torch._utils"},
    }
