"""Tests that commands in README and docs parse and are run by a test, and that links lead somewhere.

`python -m tests.test_documents [PAGE ...]` prints the faults of commands; none is executed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tyro._backends._tyro_backend import TyroBackend

import tools.bench.__main__
import tools.check.__main__
from tests.data_mixtures.conftest import code_blocks, run_shell
from tests.laneformer.serve.conftest import launch, write_model
from tests.laneformer.serve.endpoint import parse_table
from tests.train.runs import run_forked
from train.supervise.workers import hold_port

ROOT = Path(__file__).resolve().parents[1]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*/*.md"))]
FROZEN = "Repeat at commit "
NAMES = {"tools.check": tools.check.__main__.CHECKS, "tools.bench": tools.bench.__main__.BENCHMARKS}
OURS = ("records", "laneformer", "data_mixtures", "train", "evals", "tools", "examples")
JOB = "train.job_config"  # parses and checks the flags of `python -m train`
THEIRS = "sbatch|pip|docker|lm_eval|claude|ollama|aider"
# A program with words that tell its commands apart | the test that runs them with small shapes.
# The first row that fits counts.
RUN_BY = """
make MODEL=.venv/smollm2-late | tests/tools/test_delay_a_model.py::test_the_shipped_adapter_makes_smollm2_late
make chat | tests/test_make_chat.py::test_make_chat
make demo | tests/tools/test_demo.py::test_every_stage_at_a_few_steps
make setup | .ci/run::make test-all
make test | .ci/run::make test-all
make test-all | .ci/run::make test-all
make newest-torch | by hand: a download of 5 GB
make nightly | by hand: hours
laneformer --version | tests/laneformer/test_wheel.py::test_the_wheel_decodes_elsewhere
laneformer | tests/test_documents.py::test_commands_of_the_engine_are_executed
data_mixtures plan | tests/data_mixtures/test_main.py::test_stage_by_stage_is_what_prepare_does
data_mixtures show --bad-step | tests/train/test_show.py::test_a_run_is_shown_as_it_read_with_skips_and_phases
data_mixtures show | tests/data_mixtures/test_show.py::test_documents_are_found_by_id_and_by_where_they_came_from
data_mixtures.prepare own.toml | tests/data_mixtures/test_own_data.py::test_the_page_from_files_to_steps
data_mixtures.prepare data_mixtures/ablation.toml | tests/examples/test_wheels_corpus.py::test_every_machine_prepares_the_same_data
data_mixtures.prepare data_mixtures/nemotron-64k.toml | tests/data_mixtures/readers/test_hub.py::test_plan_and_fetch_from_the_hub
data_mixtures.prepare examples/debian.toml | by hand: downloads Debian packages
data_mixtures.prepare | tests/test_documents.py::test_training_lines_are_executed
examples.debian_corpus | by hand: downloads Debian packages
examples.sft_trl | tests/examples/test_sft_examples.py::test_trl
examples.sft_lora | tests/examples/test_sft_examples.py::test_lora
evals.bits_per_byte | tests/test_documents.py::test_training_lines_are_executed
evals.code | tests/evals/code/test_main.py::test_the_command
evals.compare | tests/evals/test_compare.py::test_runs_checkpoints_and_phases_are_compared_by_name
evals.core | tests/evals/core/test_evaluate.py::test_the_command
evals.lm_eval --lengths | tests/evals/lm_eval/test_tasks.py::test_all_eleven_tasks_are_scored_at_both_lengths
evals.lm_eval | tests/evals/lm_eval/test_models.py::test_task_files_of_ones_own_are_answered_and_go_on_when_they_end_in_the_middle
evals.samples | tests/evals/test_samples.py::test_built_in_prompts_through_the_engine
evals.watch --gpu | tests/evals/test_watch.py::test_cores_and_a_gpu_of_its_own
evals.watch | tests/evals/test_watch.py::test_a_job_evaluates_its_own_checkpoints_and_a_killed_watcher_goes_on
tools.ablate | tests/tools/test_ablate.py::test_an_interrupted_ablation_leaves_no_run_behind_and_goes_on_as_if_it_had_not_been
tools.average | tests/tools/test_average.py::test_it_is_the_mean_in_float64
tools.bench cuda | tests/tools/bench/test_cuda.py::test_without_a_gpu_it_says_so_and_writes_nothing
tools.bench decode | tests/tools/bench/test_decode.py::test_ours_alone_from_the_command_line
tools.bench latency | tests/tools/bench/test_latency.py::test_the_command_measures_every_variant
tools.bench train --gpus | by hand: eight GPUs
tools.bench train | tests/tools/bench/test_train.py::test_toy_run
tools.check structure | Makefile::-m tools.check.structure
tools.check train | tests/tools/check/test_train.py::test_a_cpu_is_accepted
tools.check engine | tests/laneformer/engine/test_quality.py::test_a_folder_from_the_command_line
tools.check.engine | tests/laneformer/engine/test_quality.py::test_the_engine_passes
tools.dashboard | tests/test_documents.py::test_training_lines_are_executed
tools.delay_a_model | tests/tools/test_delay_a_model.py::test_the_command_is_interrupted_and_goes_on
tools.delay_a_model.apply | tests/tools/test_delay_a_model.py::test_the_shipped_adapter_makes_smollm2_late
tools.export_hf | tests/test_documents.py::test_training_lines_are_executed
tools.import_hf | tests/test_documents.py::test_training_lines_are_executed
tools.launch --decay-from | tests/tools/launch/test_launch.py::test_decay_branch
tools.launch --partition | tests/tools/launch/test_launch.py::test_batch_script_asks_for_what_was_said
tools.launch | tests/tools/launch/test_slurm.py::story
tools.plan --dry-run | tests/tools/test_plan.py::test_the_dry_run_takes_a_step_of_192_ranks_and_what_does_not_fit_is_refused
tools.plan | tests/tools/test_plan.py::test_published_sums
tools.roofline | tests/tools/test_roofline.py::test_the_rows_of_the_docs_come_out
train configs/phase2.toml | tests/train/test_production.py::test_phases_2_and_3_go_on_from_there
train configs/sft.toml | tests/train/sft/test_jobs.py::test_shipped_job
train configs/phase1.toml | tests/train/test_production.py::test_short_form
train | tests/test_documents.py::test_training_lines_are_executed
train.sft | tests/train/sft/test_prepare.py::test_as_commands
train.sft.identity | tests/train/sft/test_prepare.py::test_as_commands
train.supervise | tests/train/test_production.py::test_supervised_replicas_survive_a_killed_rank
train.supervise.preflight | tests/train/supervise/test_preflight.py::test_a_node_says_what_it_has_and_what_it_lacks
sbatch data_mixtures/ray.sbatch | tests/data_mixtures/stages/test_slurm.py::test_the_script_prepares_on_all_nodes_of_a_job
sbatch | by hand: the watcher as a job of Slurm
pip wheel | tests/laneformer/test_wheel.py::test_the_wheel_decodes_elsewhere
pip laneformer | by hand: the name is on no index
pip | Makefile::-e .
docker | tests/test_container.py::test_it_serves
lm_eval | tests/laneformer/serve/clients/test_lm_eval.py::test_scores_are_the_engines
claude | tests/laneformer/serve/clients/test_apis.py::test_claude_code
ollama | tests/laneformer/serve/clients/test_apis.py::test_ollama
aider | by hand: litellm, its client library, is tested
"""  # noqa: E501


# --- commands, which a process of its own parses, since TorchTitan keeps global state


class Parsed(BaseException):
    """Ends a program when its arguments are parsed. `rest`: those that it passes on to a job."""

    def __init__(self, rest: Sequence[str]):
        self.rest = rest


def stop_after_parsing() -> None:
    """Make programs of this process end where tyro or argparse has read their arguments."""
    for parser, name in (
        (TyroBackend, "parse_args"),
        (argparse.ArgumentParser, "parse_known_args"),
    ):
        setattr(parser, name, then_stop(getattr(parser, name)))


def then_stop(parse: Callable[..., tuple[Any, list[str] | None]]) -> Callable[..., NoReturn]:
    def parse_and_stop(*values: Any, **options: Any) -> NoReturn:
        raise Parsed(parse(*values, **options)[1] or ())

    return parse_and_stop


def list_commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (program, its arguments) of a page's fenced lines and code spans; of ours, the module."""
    text = re.sub("<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
    blocks = [block for language, block in fence.findall(text) if language in ("", "bash")]
    # an indented block is the loop that tests/data_mixtures/test_page.py runs
    plain = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", plain)]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    for line in [*lines, *spans]:
        # of `sbatch --wrap "..."` the command in quotes; a variable's value is not known
        line = re.sub(r'--wrap "(.*)"', r"; \1", re.sub(r"\$\w+", "1", line))
        line = line.replace(" 2>/dev/null", "")
        start = re.search(
            rf"(?:^|python3? |torchrun .*?|[|;&] |=\S+ )((?:-m|laneformer|make|{THEIRS}) .*)", line
        )
        if start is None:
            continue
        words = shlex.shlex(start[1], posix=True, punctuation_chars="|&;")
        words.whitespace_split = True
        program, *arguments = itertools.takewhile(lambda word: not set(word) <= {*"|&;"}, words)
        if program == "-m":
            program, *arguments = arguments
        is_command = program.split(".")[0] in (*OURS, "make", *THEIRS.split("|"))
        if is_command and not program.endswith(".NAME"):
            yield program, arguments


def fault_of(program: str, arguments: list[str]) -> str | None:
    """Return the error of the program's parser, or of the job's parser for the job's arguments."""
    if program in THEIRS.split("|"):
        return None
    # the name alone, as in a sentence
    if len(arguments) < (2 if program == "laneformer" else 1):
        return None
    if program == "make":
        targets = re.findall(r"^([\w-]+)(?::|(?= [\w -]+:))", (ROOT / "Makefile").read_text(), re.M)
        return None if arguments[0] in targets else f"make has no target {arguments[0]}"
    is_of_job = [word.startswith("--") and "." in word.split("=")[0] for word in arguments]
    flags = arguments[is_of_job.index(True) :] if any(is_of_job) else []
    if program == "train":
        return run_parser(JOB, flags)
    fault = run_parser(program, arguments)
    if fault is None and flags:
        file = [] if "--job.config_file" in flags else ["--job.config_file", "configs/phase1.toml"]
        fault = run_parser(JOB, [*file, *flags])
    return fault


def run_parser(module: str, arguments: list[str]) -> str | None:
    output = io.StringIO()
    sys.argv = [module, *arguments]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            if module == "laneformer":
                module = "laneformer.cli"
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Parsed as parsed:
        # what has a dot in its name is the job's
        unread = [*parsed.rest][:1]
        return None if not unread or "." in unread[0] else f"unknown argument {unread[0]}"
    except SystemExit as end:
        return (
            None
            if end.code in (0, None)
            else " ".join(f"{end.code} {output.getvalue()}".split())[:300]
        )
    except ImportError as error:
        return str(error)
    return "ended without a parser"


def print_faults(pages: Sequence[Path]) -> None:
    stop_after_parsing()
    for page in pages:
        for program, arguments in list_commands(page):
            if fault := fault_of(program, arguments):
                print(f"{page.name}: {program} {shlex.join(arguments)}: {fault}")


@pytest.mark.job
def test_every_command_is_parsed_by_its_program(tmp_path):
    assert sum(len([*list_commands(page)]) for page in GUIDES) > 150
    planted = {
        "python -m tools.gone x": "No module named tools.gone",
        "torchrun ... -m train --job.config_file configs/phase1.toml --training.stepz 5": "stepz",
        "python -m tools.plan configs/phase1.toml --mixture.lok data/x": "lok",
        "printf 'Hi' | laneformer chat DIR --temperatur 1": "temperatur",
        "python -m evals.watch --run runs/x --onze": "unknown argument --onze",
        "make coffee": "make has no target coffee",
    }
    page = tmp_path / "planted.md"
    page.write_text("```\n" + "\n".join(planted) + "\n```\n")
    status, output = run_forked(tmp_path, "tests.test_documents", str(page), *map(str, GUIDES))
    assert status == 0, output
    faults = [line for line in output.splitlines() if line.startswith("planted.md")]
    assert len(faults) == len(planted), output
    assert all(words in output for words in planted.values()), output
    assert not [
        line
        for line in output.splitlines()
        if re.match(r"[\w-]+\.md: ", line) and line not in faults
    ]


# --- what runs each command


def list_unrun(pages: Sequence[Path]) -> Iterator[str]:
    """Yield commands that no row fits, rows that name no test or one without a flag, unused rows."""
    rows = parse_table(RUN_BY)
    unused = {key for key, _ in rows}
    for page in pages:
        for program, arguments in list_commands(page):
            line = f"{page.name}: {program} {shlex.join(arguments)}"
            words = {program, *arguments}
            fits = [
                row for row in rows if row[0].split()[0] == program and {*row[0].split()} <= words
            ]
            if not fits:
                yield f"{line}: name the test that runs it in RUN_BY"
                continue
            key, runner = fits[0]
            unused.discard(key)
            file, _, test = runner.partition("::")
            if file.startswith("by hand"):
                continue
            if (f"def {test}(" if file.endswith(".py") else test) not in (ROOT / file).read_text():
                yield f"{file} has no {test}"
            if program in THEIRS.split("|") or (ROOT / file) == Path(__file__):
                continue
            text = read_with_helpers(ROOT / file)
            # a job's fields, with a dot, were parsed; tests of evaluations pass --out in an object
            for flag in re.findall(r" --([\w-]+)(?=[ =]|$)", line):
                spelled = rf"\b{flag.replace('-', '[-_]')}\b"
                if flag not in ("help", "out") and not re.search(spelled, text):
                    yield f"{line}: {file} runs nothing with --{flag}"
    yield from (f"no page has {key}" for key in unused)


def read_with_helpers(test: Path) -> str:
    """Return the text of a test file and of what it imports from tests/."""
    text = test.read_text()
    names = re.findall(r"^from (tests\.[\w.]+) import", text, re.M)
    files = [test.with_name("conftest.py"), *(ROOT / f"{n.replace('.', '/')}.py" for n in names)]
    return "".join([text, *(file.read_text() for file in files if file.exists())])


def test_every_command_is_run_by_a_test(tmp_path):
    assert not [*list_unrun(GUIDES)]
    page = tmp_path / "planted.md"
    page.write_text("`python -m tools.gone`, `python -m tools.roofline --deaf`")
    unknown, without_flag, *_ = list_unrun([page])
    assert "tools.gone : name the test" in unknown
    assert "test_roofline.py runs nothing with --deaf" in without_flag


@pytest.mark.rotate
def test_commands_of_the_engine_are_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("BROWSER", "true")
    model = str(write_model(tmp_path, max_position_embeddings=32768))
    places = {"~/.cache/laneformer-prefixes": str(tmp_path / "cache"), "8000": "0", "300m": "tiny"}
    for page in GUIDES:
        for program, arguments in list_commands(page):
            if program != "laneformer" or len(arguments) < 2:
                continue
            command, *words = (places.get(word, word) for word in arguments)
            if not words[0].startswith("-"):
                words[0] = model
            run_engine_command(command, *words)


def run_engine_command(command: str, *words: str) -> None:
    if command == "serve":
        port = [] if "--port" in words else ["--port=0"]
        server = launch("-m", "laneformer.cli", "serve", *words, *port)
        assert server.stop() == 0, server.output()
        return
    line = [sys.executable, "-m", "laneformer.cli", command, *words]
    outcome = subprocess.run(line, input="Hi\n", capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.rotate
def test_training_lines_are_executed(tmp_path):
    (readme,) = (code for _, code in code_blocks("../README.md") if "evals.bits_per_byte" in code)
    (exporting,) = (code for _, code in code_blocks("train.md") if "tools.import_hf" in code)
    (python,) = (code for language, code in code_blocks("../README.md") if language == "python")
    script = "\n".join([readme, exporting.splitlines()[1], "python - <<'END'", python, "END"])
    few = "--training.steps 3 --lr_scheduler.warmup_steps 1"
    parent = "--checkpoint.initial_load_path runs/debug_phase1/checkpoint/step-3"
    for long, short in {
        "debug_phase1.toml": f"debug_phase1.toml {few}",
        "debug_phase2.toml": f"debug_phase2.toml {few} {parent}",
        "step-150": "step-3",
        "--data data/demo": "--data data/demo --limit 4",
    }.items():
        assert long in script
        script = script.replace(long, short)
    for name in ("configs", "data_mixtures"):
        (tmp_path / name).symlink_to(ROOT / name)
    run_shell(script, tmp_path, OMP_NUM_THREADS="1")
    assert (tmp_path / "dashboard.html").exists()
    assert (tmp_path / "runs/imported/checkpoint/step-0").is_dir()


# --- names and links anywhere on a page


def test_commands_and_links():
    faults = [f"{page.relative_to(ROOT)}: {fault}" for page in PAGES for fault in faults_of(page)]
    assert not faults


def faults_of(page: Path) -> Iterator[str]:
    """Yield modules that cannot be run, and job files and links that lead nowhere."""
    text = re.sub("<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    # of a page with a commit of its own, only links count
    commands = "" if FROZEN in text else text
    modules = {
        name for name in re.findall(r"-m ([\w.]+\w)", commands) if name.split(".")[0] in OURS
    }
    yield from (name for name in modules if not exists(name) and not name.endswith(".NAME"))
    for command, names in NAMES.items():
        arguments = re.findall(rf"python -m {re.escape(command)} ([a-z]\w*)", commands)
        yield from (f"{command} {name}" for name in arguments if name not in names)
    files = re.findall(r"(?:configs|data_mixtures|examples)/[\w-]+\.toml", commands)
    yield from (name for name in files if not (ROOT / name).is_file())
    links = [
        link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link
    ]
    yield from (link for link in links if link and not (page.parent / link).exists())


def exists(module: str) -> bool:
    """Return whether `python -m module` finds something to run."""
    try:
        spec = importlib.util.find_spec(module)
        if spec and spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError:
        return False
    main = 'if __name__ == "__main__":'
    return bool(spec and spec.origin) and main in Path(spec.origin).read_text(encoding="utf-8")


def test_what_leads_nowhere_is_named(tmp_path):
    page = tmp_path / "page.md"
    commands = "`python -m tools.gone x`, `python -m tools.check int8`, configs/gone.toml"
    page.write_text(f"{commands}, [here](page.md#a) and [there](gone.md)")
    assert list(faults_of(page)) == [
        "tools.gone",
        "tools.check int8",
        "configs/gone.toml",
        "gone.md",
    ]
    # a package without a __main__ cannot be run, nor a module without a main
    modules = ("evals.core", "evals.gone.further", "records", "records.files")
    assert [exists(module) for module in modules] == [True, False, False, False]


def test_no_page_promises_an_index():
    # until docs/release.md is done, `pip install laneformer` would install what anybody registers
    promise = re.compile(r"(pipx?|uv)\b.*\b(install|run)\b[^.\n]*?[ \"']laneformer\b(?!-)")
    pages = [page for page in PAGES if page.name != "release.md"]
    promises = [
        f"{page.name}: {match[0]}" for page in pages for match in promise.finditer(page.read_text())
    ]
    assert promises == [], "say `pip install .` from a checkout"


def test_files_named_by_the_architecture_page_exist():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w./]*\w\.(?:py|cpp|h|cu|cuh))`", text))
    folders = [ROOT / top for top in (*OURS, "models", "tests")]
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.*")]
    assert len(names) > 30
    assert not [name for name in names if not any(file.endswith(f"/{name}") for file in files)]


def test_help_names_the_command_and_not_the_file_of_this_machine():
    programs = [
        path
        for top in ("tools", "examples", "train", "evals")
        for path in (ROOT / top).rglob("*.py")
    ]
    calls = {
        p: re.findall(r"tyro\.cli\((?:[^()]|\([^()]*\))*\)", p.read_text(encoding="utf-8"))
        for p in programs
    }
    assert not [p for p, texts in calls.items() if any("prog=" not in text for text in texts)]


@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("strucure", 2)])
@pytest.mark.parametrize("command", [tools.check.__main__, tools.bench.__main__])
def test_a_list_of_commands_names_them(command, word, status, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["command", word])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == status
    package = command.__name__.removesuffix(".__main__")
    printed = capsys.readouterr().err
    assert all(
        name in printed and importlib.util.find_spec(f"{package}.{name}") for name in NAMES[package]
    )


# --- docs/start.md

SECTIONS = re.findall(
    r"^## ([^\n]*)\n.*?^```\n(.*?)^```", (ROOT / "docs/start.md").read_text(), re.M | re.S
)


def test_the_first_page_has_ten_lines_for_each_kind_of_machine():
    assert [name for name, _ in SECTIONS] == [
        "Chat",
        "Serving",
        "A laptop",
        "One GPU",
        "Eight GPUs",
        "Slurm",
    ]
    assert all(len(block.splitlines()) <= 10 for _, block in SECTIONS)


@pytest.mark.rotate
@pytest.mark.parametrize("name", ["Chat", "Serving"])
def test_chat_and_serving_are_executed(name, tmp_path):
    model = write_model(tmp_path, max_position_embeddings=512)
    # `make chat` has its own test; serving goes on with the model of the chat
    lines = [
        line
        for line in dict(SECTIONS)[name].splitlines()
        if not line.startswith(("make", "MODEL="))
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with hold_port() as holder:
        script = "\n".join([f"MODEL={model}", *lines]).replace("8000", str(holder.getsockname()[1]))
        outcome = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    if name == "Serving":
        assert '{"status":"ok"}' in outcome.stdout
        assert '"role":"assistant"' in outcome.stdout
        assert re.search(r"^laneformer_generated_tokens_total [1-9]", outcome.stdout, re.MULTILINE)


if __name__ == "__main__":
    print_faults([Path(page) for page in sys.argv[1:]] or GUIDES)
