"""Lm_eval."""
