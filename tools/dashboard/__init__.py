"""Dashboard."""
