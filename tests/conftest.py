"""What all tests share."""

import os
import tempfile
from pathlib import Path

import pytest

from ssdtrain.storage.linux import filesystem_type


@pytest.fixture
def tmp_path(tmp_path):
    """On a disk, also where /tmp is RAM."""
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        in_ram = filesystem_type(fd) == "tmpfs"
    finally:
        os.close(fd)
    if not in_ram:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        yield Path(directory)
