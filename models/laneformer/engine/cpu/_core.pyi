"""The compiled core; see csrc/bindings.cpp."""

from typing import Any

def __getattr__(name: str) -> Any: ...
