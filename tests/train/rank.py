"""A rank that notes how it was started and waits for all others; no torch, so that a real start is quick.

    torchrun ... -m tests.train.rank FOLDER

Rank 1 exits with 3.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

FACTS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "GIVEN")
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE, signal.SIGXFSZ)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    facts = {
        "environment": {name: os.environ.get(name) for name in FACTS},
        # the shell's own and what torch notes in a process that compiles begin with an underscore
        "names": sorted(name for name in os.environ if not name.startswith("_")),
        "module": sys.modules["__main__"].__spec__.name,
        "leads_its_group": os.getpgrp() == os.getsid(0) == os.getpid(),
        "signals": [str(signal.getsignal(number)) for number in ENDS],
        "descriptors": sorted(int(each) for each in os.listdir("/proc/self/fd"))[3:-1],
        "cwd": os.getcwd(),
    }
    (folder / f"part.{rank}").write_text(json.dumps({**facts, "pid": os.getpid(), "parent": os.getppid()}))
    (folder / f"part.{rank}").rename(folder / f"rank.{rank}.json")
    print(f"rank {rank} says hello", flush=True)
    while len(list(folder.glob("rank.*.json"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    sys.exit(3 * rank)


if __name__ == "__main__":
    main()
