"""Tests on real devices are there only where a device is."""

import os

import torch

# Before the first use of cuBLAS: without it, matrix products are not deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

collect_ignore = [] if torch.cuda.is_available() else ["test_gpu.py"]
