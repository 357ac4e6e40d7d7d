"""Whether GPUDirect Storage works on a file, tried in a process of its own: the chain below may hang or crash.

```
python -P gds_probe.py FILE DEVICE gds|compat
```

prints one line: "gds", "gds-compat", or "no: " and the reason. FILE is an existing, empty file and is empty again
afterwards. Standard library and kvikio only: importing ssdtrain would bring torch, which takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

# Above kvikio's threshold for cuFile, in more than one page, and with a tail.
NBYTES = (1 << 20) + 513


class _DeviceMemory:
    """Memory of a GPU, from the driver itself."""

    def __init__(self, device: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(NBYTES))
        self._address = address
        self.__cuda_array_interface__ = {
            "shape": (NBYTES,),
            "typestr": "|u1",
            "data": (address.value, False),
            "strides": None,
            "version": 3,
        }

    def fill(self, content: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", self._address, content, ctypes.c_size_t(NBYTES))

    def content(self) -> bytes:
        out = ctypes.create_string_buffer(NBYTES)
        self._call("cuMemcpyDtoH_v2", out, self._address, ctypes.c_size_t(NBYTES))
        return out.raw

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} of the CUDA driver failed with {code}")


def probe(path: str, device: int, *, compat: bool) -> str:
    """Write from device memory and read it back.

    Returns:
        "gds", or "gds-compat" where kvikio or cuFile is known to copy through host memory.
    """
    import kvikio
    import kvikio.cufile_driver
    import kvikio.defaults

    if not compat:
        if not Path("/proc/modules").exists():
            # libcufile would look for it for ever.
            raise RuntimeError("there is no /proc/modules, which cuFile needs")
        kvikio.cufile_driver.driver_open()
    kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON if compat else kvikio.CompatMode.OFF)
    memory = _DeviceMemory(device)
    content = os.urandom(NBYTES)
    memory.fill(content)
    os.truncate(path, NBYTES)
    try:
        with kvikio.CuFile(path, "r+") as file:
            written = file.pwrite(memory).get()
            memory.fill(bytes(NBYTES))
            read = file.pread(memory).get()
    finally:
        os.truncate(path, 0)
    if (written, read) != (NBYTES, NBYTES) or memory.content() != content:
        raise RuntimeError("what was written from device memory did not come back")
    native = not compat and kvikio.cufile_driver.get("is_gds_available")
    return "gds" if native else "gds-compat"


def main(path: str, device: str, mode: str) -> None:
    """Print the answer."""
    try:
        answer = probe(path, int(device), compat=mode == "compat")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        text = str(error).strip() or type(error).__name__
        answer = f"no: {text.splitlines()[0]}"
    print(answer, flush=True)  # noqa: T201 - the answer
    # Not through the exit handlers of cuFile and the driver, which may hang.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
