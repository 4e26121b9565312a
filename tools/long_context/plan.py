"""What the experiment trains: its config file, checked, as the jobs of a trunk and of the ropes that branch from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from data_mixtures.recipe import check_known
from laneformer import LaneformerConfig
from records.job import read_sections


@dataclass(frozen=True)
class Stage:
    """One length of window; the first is the trunk's, the others extend it."""

    seq_len: int
    tokens: int
    batch_tokens: int
    learning_rate: float
    compile: str | None = None


@dataclass(frozen=True)
class Job:
    """One run of the trainer. parent: the run whose weights it starts from."""

    delay: int
    layout: str
    seed: int
    rope: str
    stage: int
    model: dict[str, Any]

    @property
    def trunk(self) -> str:
        return f"delay{self.delay}-{self.layout}-seed{self.seed}"

    def name_of(self, stage: int) -> str:
        return f"{self.trunk}-{self.rope}-stage{stage}" if stage else self.trunk

    @property
    def name(self) -> str:
        return self.name_of(self.stage)

    @property
    def parent(self) -> str | None:
        return self.name_of(self.stage - 1) if self.stage else None


@dataclass(frozen=True)
class Plan:
    """The config file. ropes: fields of LaneformerConfig, in which "full" stands for the layers without a window, and
    "factor" for the growth of the window since the trunk.
    """

    job: dict[str, Any]
    seeds: list[int]
    task_percent: int
    shape: dict[str, Any]
    stages: list[Stage]
    delays: list[int]
    layouts: dict[str, list[int]]
    ropes: dict[str, dict[str, Any]]
    scored: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> Plan:
        """ValueError for what the file gets wrong."""
        values = tomli.loads(path.read_text(encoding="utf-8"))
        keys = [field.name for field in dataclasses.fields(cls)]
        check_known(f"key of {path}", values, keys)
        if missing := sorted({*keys} - values.keys()):
            raise ValueError(f"{path} lacks {', '.join(missing)}")
        for stage in values["stages"]:
            check_known(
                f"key of [[stages]] in {path}", stage, [field.name for field in dataclasses.fields(Stage)]
            )
        stages = [Stage(**stage) for stage in values["stages"]]
        plan = cls(**values | {"stages": stages, "job": read_sections(Path(values["job"]))})
        for group in plan.groups():
            for job in group:
                LaneformerConfig(**job.model)
        return plan

    def steps(self, stage: int) -> int:
        own = self.stages[stage]
        return max(1, round(own.tokens / own.batch_tokens))

    def model(self, delay: int, layout: str, rope: str, stage: int) -> dict[str, Any]:
        length, full = self.stages[stage].seq_len, self.layouts[layout]
        windowed = [i for i in range(self.shape["num_hidden_layers"]) if i not in full]
        model = {
            **self.shape,
            "broadcast_delay": delay,
            "swa_layers": windowed,
            "max_position_embeddings": length,
        }
        if stage:
            own = dict(self.ropes[rope])
            if own.get("nope_layers") == "full":
                own["nope_layers"] = list(full)
            if "rope_scaling" in own:
                short = self.stages[0].seq_len
                own["rope_scaling"] = {
                    **own["rope_scaling"], "factor": length / short, "original_max_position_embeddings": short,
                }  # fmt: skip
            model |= own
        return model

    def groups(self) -> Iterator[list[Job]]:
        """Each a trunk and what branches from it, in the order in which they are trained."""
        for seed in self.seeds:
            for delay in self.delays:
                for layout in self.layouts:
                    base = Job(delay, layout, seed, "", 0, self.model(delay, layout, "", 0))
                    yield [base] + [
                        Job(delay, layout, seed, rope, stage, self.model(delay, layout, rope, stage))
                        for rope in self.ropes
                        for stage in range(1, len(self.stages))
                    ]
