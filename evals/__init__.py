"""Evaluations of a model through the engine; each appends one record to the run's evals.jsonl."""
