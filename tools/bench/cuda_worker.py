"""The process that holds the GPU for tools.bench.cuda: a line "STEP SECONDS" in, a line of JSON out.

A step that breaks the GPU's context, or hangs, ends this process and no more: the next step gets a new one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


def serve(session: Any, steps: dict[str, Callable[[Any], Any]], alive: Callable[[], bool]) -> None:
    """Answer every line of stdin; stdout carries answers alone, what libraries print goes to stderr.

    An answer says whether it is the last one, so that its reader gives the next step to another process.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        name, seconds = line.split()
        session.deadline = time.monotonic() + float(seconds)
        try:
            answer = {"result": steps[name](session)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
        ends = not alive()
        print(json.dumps({**answer, "ends": ends}), file=answers, flush=True)
        if ends:
            break


def context_alive() -> bool:
    """Whether the GPU still answers this process: after an illegal access it never does again."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavor", default="2b")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--without", action="append", default=[], help="a version that is known to be broken")
    parser.add_argument("--smoke", action="store_true", help="one short text, for compute-sanitizer")
    options = parser.parse_args()
    from tools.bench.cuda_sanitize import smoke  # heavy imports, once it is known what for
    from tools.bench.cuda_session import Session
    from tools.bench.cuda_steps import STEPS

    session = Session(options.flavor, options.dtype, options.runs, options.without)
    if options.smoke:
        smoke(session)
    else:
        serve(session, STEPS, context_alive)


if __name__ == "__main__":
    main()
