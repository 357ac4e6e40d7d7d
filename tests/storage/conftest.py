"""What the storage tests share: real small file systems, and a driver for machines without a GPU."""

import ctypes
import os
import shutil
import subprocess

import pytest
import torch

from ssdtrain.storage import gds

from .stand_in import DEVICES, StandIn, build

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


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory):
    """The driver that the real kvikio runs on here."""
    kvikio = pytest.importorskip("kvikio", reason="pip install --no-deps -r tests/kvikio.txt")
    pytest.importorskip("kvikio.defaults")

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a CUDA driver, whose place the stand-in would take")
    # CUDA's runtime looks for a driver once: now, and not when it would find the stand-in.
    torch.cuda.is_available()
    library = build(tmp_path_factory.mktemp("stand-in"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAND_IN_DEVICES", str(DEVICES))
        loaded = StandIn(library)
    with kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON):
        yield loaded


@pytest.fixture
def on_stand_in(stand_in, monkeypatch):
    """Child processes run on the stand-in too."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stand_in.directory))
    monkeypatch.setenv("STAND_IN_DEVICES", str(DEVICES))
    return stand_in


@pytest.fixture
def untried(monkeypatch):
    """Stores open without their trial in a child process, which takes half a second."""
    monkeypatch.setattr(gds, "_probe", lambda _file, _device, *, compat: "gds-compat" if compat else "gds")


@pytest.fixture
def gds_store(stand_in, untried, tmp_path):
    """A store that moves device memory."""
    store = gds.GdsStore(tmp_path)
    store.open_device(0, compat=True)
    yield store
    stand_in.fail_no_more()
    store.close()
