"""One HTML page for one or many runs: `python -m tools.dashboard RUN...`."""
