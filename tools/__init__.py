"""Commands around the product: `python -m tools.NAME`. Nothing imports them."""
