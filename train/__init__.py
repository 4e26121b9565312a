"""The training job: TorchTitan's trainer with our data, checkpoints that cannot start wrong, and a run folder."""
