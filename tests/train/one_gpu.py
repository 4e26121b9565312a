"""A machine with one GPU, as far as torch says: named as `experimental.custom_import` by a test."""

from __future__ import annotations

import torch

import train.spec  # noqa: F401 - what custom_import names otherwise

torch.cuda.device_count = lambda: 1
