"""One verb a file: `python -m tools.<verb>`."""
