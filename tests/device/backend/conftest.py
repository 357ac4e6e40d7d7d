"""The tests in this folder need a process of their own: see `tests/device/test_torch_backend.py`."""

import pytest

from tests.device.backend.late import load

LATE = load()


@pytest.fixture
def late():
    """The library, for its switches."""
    return LATE
