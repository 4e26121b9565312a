"""Commands around the product: `python -m tools.NAME`. Nothing imports them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the checkout
