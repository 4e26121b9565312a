"""The training job: TorchTitan's trainer with our data, checkpoints that cannot start wrong,
and a run folder.

The run folder is plain files with everything needed to understand, continue, export and plot a run:

config.toml      the resolved job config            attempts.jsonl   one line per attempt: code, start checkpoint
model.json       the architecture                   metrics.jsonl    one line per logged step
tokenizer.model  or tokenizer.json                checkpoint/      TorchTitan's DCP checkpoints, step-N
events.jsonl     one line per event                 outcome.json     how the last attempt ended
logs/            output of every attempt            heartbeats/      one file per rank
bad-steps/       batches of refused steps           checkpoint-aside/  damaged or abandoned checkpoints
stop             create it to save and stop         skip_sequences.json  data that is left out, and why
"""
