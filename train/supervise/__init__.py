"""Supervise."""
