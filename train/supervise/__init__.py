"""The supervisor of a job: restarts, hangs, node checks. Imports no torch."""
