"""Makes `late` the accelerator of the process that runs the checks in this folder.

Not a conftest, which whoever collects the folder would load:
`python -m pytest -p tests.device.backend.plugin tests/device/backend/check_streams.py`.
"""

import pytest

from tests.device.backend.late import load

LATE = load()


@pytest.fixture
def late():
    """The library, for its switches."""
    return LATE
