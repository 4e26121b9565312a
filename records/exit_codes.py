"""How a worker, or the supervisor, ends: exit status and `code` in outcome.json. Any other status is a crash."""

DONE = 0  # training.steps reached
CRASHED = 1
STOPPED = 85  # a signal asked to stop; a checkpoint is saved; start again
UNCLEAN = 86  # the guard refused a step; the batch is on record in events.jsonl
