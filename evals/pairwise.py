"""Two models' answers to the same questions, compared by a judge: any OpenAI-compatible server.

    python -m evals.pairwise runs/sft/hf --data questions.jsonl --judge-url http://127.0.0.1:8000/v1 --judge NAME
        --out runs/sft/evals.jsonl

A line of --data is {"question", "answer"}: the answer of the model to beat, such as a file that --answers of an
earlier run wrote. The judge sees each pair twice, with the positions swapped, since judges prefer a position; what it
says in one order only counts half. It judges as a model does: its choices are no facts, and depend on its version.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

from evals.scorer import LOCAL, Scorer, SourceFlags, open_scorer, origin
from evals.tables import console
from records.evals import NOWHERE, AboutFlags, EvalCommand, Limit, ModelFolder, optional
from records.files import JsonObject, file_sha256, json_lines, write_atomically
from records.items import write_items

TASK = """Two assistants have answered a question. Decide which answer is more helpful, correct and to the point. \
Ignore their order and length.

[Question]
{question}

[Answer A]
{a}

[Answer B]
{b}

Reply with one word: A, B or tie."""
POINTS = {"A": 1.0, "B": 0.0, "TIE": 0.5}
VERDICT = re.compile(r"\b(A|B|tie)\b[^\w]*$", re.IGNORECASE)  # the last word, after whatever it thought
JUDGE_TOKENS = 1024


def main(
    hf_dir: ModelFolder,
    data: Path,
    judge_url: str,
    judge: str,
    limit: Limit = None,
    max_new_tokens: int = 512,
    answers: Annotated[Path | None, optional("FILE", "not kept")] = None,
    source: SourceFlags = LOCAL,
    about: AboutFlags = NOWHERE,
) -> JsonObject:
    """Compare a model's answers with those of a file. The last line on stdout is the record, JSON.

    Args:
        data: JSON lines {"question", "answer"}, the answers to beat
        judge_url: OpenAI-compatible server of the judge, such as http://127.0.0.1:8000/v1
        judge: name of the judge at its server
        max_new_tokens: maximum length of an answer in tokens
        answers: file to write the model's answers to, in the form of --data
    """
    asked = read_pairs(data)[:limit]
    scorer = open_scorer(hf_dir, source)
    given = [
        scorer.generate([{"role": "user", "content": pair["question"]}], max_new_tokens).text
        for pair in asked
    ]
    who = origin(hf_dir, scorer) | {"data_sha256": file_sha256(data)}
    scorer.close()
    if answers:
        lines = (
            json.dumps({"question": p["question"], "answer": text})
            for p, text in zip(asked, given, strict=True)
        )
        write_atomically(answers, "".join(f"{line}\n" for line in lines))
    ask = open_scorer(None, replace(source, base_url=judge_url, model=judge, dtype="auto"))
    with ThreadPoolExecutor(source.concurrency) as pool:
        verdicts = list(pool.map(lambda pair, text: judged(ask, pair, text), asked, given))
    figures = {"judge": judge, "limit": limit, "max_new_tokens": max_new_tokens, **figures_of(verdicts)}
    console.print(
        f"better than {data.name}: {figures['score']:.1%} ± {figures['standard_error']:.1%} of {len(asked)} questions",
        highlight=False,
    )
    head = {"kind": "pairwise", "step": about.step, "protocol": judge, "limit": limit, **who}
    lines_of = [
        {"task": "pairwise", "item": i, "right": score_of(pair), "losses": [], "verdicts": pair}
        for i, pair in enumerate(verdicts)
    ]
    figures["items"] = write_items(about.out, head, lines_of)
    return about.append("pairwise", figures, **who)


def read_pairs(path: Path) -> list[JsonObject]:
    """The lines of a file. Raises ValueError with the number of a line that is none."""
    found = []
    for number, line in json_lines(path.read_text(encoding="utf-8").splitlines(), path):
        if not isinstance(line, dict) or not all(
            isinstance(line.get(k), str) for k in ("question", "answer")
        ):
            raise ValueError(f'{path}:{number}: not {{"question", "answer"}}, both text: {line}')
        found.append(line)
    if len(found) < 2:
        raise ValueError(f"{path} holds {len(found)} questions; at least two are needed for an error")
    return found


def judged(ask: Scorer, pair: JsonObject, answer: str) -> list[float | None]:
    """What the judge gives the model's answer, 1, 0.5 or 0, as answer A and as answer B; null: it gave no verdict."""
    found: list[float | None] = []
    for a, b, swapped in ((answer, pair["answer"], False), (pair["answer"], answer, True)):
        text = TASK.format(question=pair["question"], a=a, b=b)
        said = VERDICT.search(ask.generate([{"role": "user", "content": text}], JUDGE_TOKENS).text)
        points = POINTS[said[1].upper()] if said else None
        found.append(1 - points if swapped and points is not None else points)
    return found


def score_of(pair: list[float | None]) -> float:
    """The mean of both orders; no verdict counts as a tie."""
    return fmean(0.5 if points is None else points for points in pair)


def figures_of(verdicts: list[list[float | None]]) -> JsonObject:
    """score, the share of questions won, ties half; how often the order decided; verdicts that could not be read."""
    scores = [score_of(pair) for pair in verdicts]
    both = [pair for pair in verdicts if None not in pair]
    return {
        "questions": len(scores),
        "score": fmean(scores),
        "standard_error": stdev(scores) / len(scores) ** 0.5,
        "order_decided": sum(abs(first - second) == 1 for first, second in both),  # type: ignore[operator]
        "unreadable": sum(points is None for pair in verdicts for points in pair),
    }


COMMAND = EvalCommand("pairwise", main, reads=("--data",))


if __name__ == "__main__":
    COMMAND.run()
