"""HumanEval+ and MBPP+ with EvalPlus."""
