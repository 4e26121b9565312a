"""Stock tasks of lm-evaluation-harness."""
