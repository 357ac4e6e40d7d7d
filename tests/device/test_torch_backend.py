"""The accelerator's path through torch's own streams, events and allocators, on a device that the tests build.

It is torch's accelerator for the life of a process, so its tests have processes of their own.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.backend.late import COMPILER, build

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER!r}")
@pytest.mark.parametrize("checks", ["check_streams.py", "check_offload.py"])
def test_on_a_device_that_is_late(checks):
    build()
    child = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "tests.device.backend.plugin", f"tests/device/backend/{checks}"),
        ],
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert child.returncode == 0, child.stdout
