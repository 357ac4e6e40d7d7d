"""Builds and loads "late", the accelerator in `late.cpp`. It stays for the life of the process."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
import types
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = os.environ.get("CXX", "c++")


def build():
    """Path of the shared library; compiled once for each source and torch, outside the repository."""
    key = hashlib.sha256(f"{torch.__version__} {torch.__file__} {os.getuid()}".encode() + SOURCE.read_bytes())
    library = Path(tempfile.gettempdir()) / f"ssdtrain-late-{key.hexdigest()[:20]}.so"
    if library.exists():
        return library
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        built = Path(directory) / library.name
        subprocess.run(
            [
                *(COMPILER, "-std=c++20", "-O0", "-fPIC", "-shared"),
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                *("-isystem", root / "include", SOURCE, "-o", built),
                *("-L", root / "lib", "-ltorch_cpu", "-lc10"),
            ],
            check=True,
        )
        built.replace(library)  # another process may be building the same
    return library


def load():
    """Make it torch's accelerator; the library, for its switches."""
    library = ctypes.CDLL(str(build()))
    library.late_uses_of.argtypes = [ctypes.c_size_t]
    library.late_refuse_pinning.argtypes = [ctypes.c_bool]
    torch.utils.rename_privateuse1_backend("late")
    # What torch asks of a backend in Python. Kernels draw from the CPU's generator.
    module = types.ModuleType("torch.late")
    module.is_available = lambda: True
    module.device_count = library.late_device_count
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    torch._register_device_module("late", module)
    return library
