"""What the storage tests share: real small file systems."""

import os
import shutil
import subprocess

import pytest

MIB = 1 << 20


@pytest.fixture
def mounted(tmp_path):
    """Mounts file systems for the test: `mounted("tmpfs", "-o", "size=4m")` gives the directory."""
    directories = []

    def mount(kind, *options, source="none"):
        if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("mounting needs root")
        directory = tmp_path / f"mount{len(directories)}"
        directory.mkdir()
        done = subprocess.run(
            ["mount", "-t", kind, *options, source, directory], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"mounting {kind}: {done.stderr.strip()}")
        directories.append(directory)
        return directory

    yield mount
    for directory in directories:
        subprocess.run(["umount", "--lazy", directory], check=False)


@pytest.fixture
def small_ext4(mounted, tmp_path):
    """The directory of a real ext4 of 24 MiB."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(24 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True, capture_output=True)
    return mounted("ext4", "-o", "loop", source=image)
