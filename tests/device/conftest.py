"""Tests on real devices are there only where a device is."""

import os

import pytest
import torch

# Before the first use of cuBLAS: without it, matrix products are not deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

collect_ignore = [] if torch.cuda.is_available() else ["test_gpu.py"]


@pytest.fixture(autouse=True, scope="session")
def one_compute_thread():
    """Tensors are small, and bits must not depend on how torch divides an operation among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
