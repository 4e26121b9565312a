"""What a job costs before it runs: `python -m tools.plan JOB.toml`."""
