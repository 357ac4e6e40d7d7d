"""GPUDirect Storage: device memory straight to and from the spill file, through kvikio and cuFile."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdtrain.errors import ConfigError, StoreError
from ssdtrain.storage import kvikio_setup
from ssdtrain.storage.base import DeviceBuffer, DeviceStore, Edges, Extent, HostBuffer
from ssdtrain.storage.direct import DirectStore
from ssdtrain.storage.kvikio_setup import GdsRefusedError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ssdtrain.storage.spill_file import SpillFile

__all__ = ["GdsStore", "gds_extra", "open_gds_store"]

# A context on a busy GPU and cuFile's driver take a few seconds; libcufile can also spin for ever.
PROBE_SECONDS = 60.0

_PROBE = Path(__file__).with_name("gds_probe.py")


class GdsStore(DirectStore, DeviceStore):
    """A `DirectStore` that, once `open_device` has succeeded, moves device memory without our copying it.

    Both ways lead to the same extents of the same file: host buffers go as in `DirectStore`, device buffers through
    kvikio. The first error of kvikio's is the last: `device_store` is None from then on, and what is on disk is read
    through host buffers. Device memory is not registered with cuFile: torch's allocator may free it, or have it made
    of several physical pieces (`expandable_segments`), and cuFile can register only memory of which neither is true.

    cuFile's driver is opened by cuFile itself and never closed here, for others in the process may use it.

    Args:
        directory: As `DirectStore`.
        max_bytes: As `DirectStore`.
        min_free_bytes: As `DirectStore`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        min_free_bytes: int = 0,
    ) -> None:
        super().__init__(directory, max_bytes=max_bytes, min_free_bytes=min_free_bytes)
        self._mode = ""
        self._pid = os.getpid()
        # Guards the four below. The last one out closes, since kvikio does not close a file that is in use.
        self._device_lock = threading.Lock()
        self._device_file: Any = None
        self._device_users = 0
        self._usable = False
        self._device_closing = False

    def open_device(self, device: int, *, compat: bool) -> None:
        """Prove that device memory can be written and read back, and use it from now on. Before the first extent.

        The proof is made in a child process, since a broken installation can hang or crash, on this store's own file.

        Args:
            device: The accelerator's index, for the proof.
            compat: Whether copying through host memory will do. It saves nothing over what is done without kvikio.

        Raises:
            GdsRefusedError: It cannot; the store is what it was.
        """
        kvikio = kvikio_setup.load()
        modes = kvikio.CompatMode
        told = kvikio.defaults.get("compat_mode") == modes.ON
        if told and not compat:
            raise GdsRefusedError("kvikio is told to copy through host memory (KVIKIO_COMPAT_MODE)")
        mode = _probe(self._file, device, compat=told)
        if mode != "gds" and not compat:
            raise GdsRefusedError(
                "cuFile would copy through host memory, since the kernel module nvidia-fs is not there"
            )
        kvikio_setup.settings.enter(kvikio)
        try:
            # With OFF, where cuFile does not take this file, opening it is an error and not a slower way in silence.
            with (
                self._file.path("cannot open the spill file for kvikio") as (path, _),
                kvikio_setup.compat_mode(kvikio, modes.ON if told else modes.OFF),
            ):
                # Neither truncating nor creating.
                self._device_file = kvikio.CuFile(path, "r+")
        except Exception as error:
            kvikio_setup.settings.leave()
            raise GdsRefusedError(f"kvikio cannot open the spill file ({one_line(error)})") from error
        self._mode = mode
        self._usable = True

    @property
    def backend(self) -> str:
        """The path of device memory: "gds", "gds-compat", or without kvikio "direct" or "buffered".

        "gds" says that cuFile has taken the file and that its kernel module is loaded; "gds-compat", that kvikio was
        told to copy through host memory (`KVIKIO_COMPAT_MODE=ON`), or that cuFile found no module. What cannot be
        known: cuFile may still copy a single transfer through host memory, which its log tells, and a newer cuFile
        can do without the module, which is called "gds-compat" here.
        """
        return self._mode if self._usable else super().backend

    def device_store(self, extent: Extent) -> DeviceStore | None:
        """Itself, unless kvikio has failed, or the extent was written with bytes of it left in host memory."""
        # A forked child has none of the threads that kvikio waits for.
        if not self._usable or os.getpid() != self._pid:
            return None
        in_place = any(edges.head or edges.tail for edges in extent.edges.values())
        return None if in_place else self

    def write_device(self, extent: Extent, buffer: DeviceBuffer, offset: int = 0) -> None:
        """Write the buffer from where it is."""
        self._check(extent, buffer, offset)
        # As in `DirectStore.write`.
        extent.edges.pop(offset, None)
        self._move("write", buffer, extent.offset + offset)
        extent.edges[offset] = _FromDevice(buffer.nbytes)

    def read_device(self, extent: Extent, buffer: DeviceBuffer, offset: int = 0) -> None:
        """Fill the buffer where it is."""
        self._check(extent, buffer, offset)
        edges = self._written(extent, buffer, offset)
        if edges.head or edges.tail:
            doing = f"cannot read {buffer.nbytes} bytes at offset {extent.offset + offset} into device memory"
            raise StoreError(errno.EINVAL, f"{doing}: some of them are in host memory", self._file.directory)
        self._move("read", buffer, extent.offset + offset)

    def close(self) -> None:
        """Close the file; kvikio's descriptors of it when the last transfer has ended."""
        with self._device_lock:
            self._usable = False
            self._device_closing = True
            last = self._device_users == 0
        if last:
            self._close_device()
        super().close()

    def _written(self, extent: Extent, buffer: HostBuffer | DeviceBuffer, offset: int) -> Edges:
        """Also a part of what was written from device memory, which staging buffers ask for."""
        for start, edges in extent.edges.items():
            end = start + edges.nbytes
            if isinstance(edges, _FromDevice) and start <= offset and offset + buffer.nbytes <= end:
                return Edges(buffer.nbytes)
        return super()._written(extent, buffer, offset)

    def _move(self, verb: str, buffer: DeviceBuffer, position: int) -> None:
        doing = f"cannot {verb} {buffer.nbytes} bytes at offset {position} of the spill file with kvikio"
        with self._in_use(doing) as file:
            # Both are held until `get` returns: the future holds neither.
            view = _CudaBytes(buffer)
            try:
                start = file.pwrite if verb == "write" else file.pread
                count = start(view, buffer.nbytes, position).get()
            except Exception as error:
                raise self._failure(verb, buffer, doing, one_line(error)) from error
        if count != buffer.nbytes:
            raise self._failure(verb, buffer, doing, f"it moved {count}")

    def _failure(self, verb: str, buffer: DeviceBuffer, doing: str, reason: str) -> StoreError:
        """The error for a transfer that failed; if the disk is not simply full, kvikio is not used again."""
        if verb == "write" and self._file.lacks_room(buffer.nbytes):
            return StoreError(errno.ENOSPC, f"{doing}: the disk is full ({reason})", self._file.directory)
        with self._device_lock:
            first, self._usable = self._usable, False
        if first:
            # On an I/O thread, where a filter that makes it an error would hide the one that follows.
            with suppress(RuntimeWarning):
                warnings.warn(
                    _fallback(self._file.directory, reason, super().backend), RuntimeWarning, stacklevel=4
                )
        return StoreError(errno.EIO, f"{doing}: {reason}", self._file.directory)

    @contextmanager
    def _in_use(self, doing: str) -> Iterator[Any]:
        """The file that kvikio has open."""
        with self._device_lock:
            usable = self._usable and os.getpid() == self._pid
            self._device_users += usable
        if not usable:
            raise StoreError(errno.EIO, f"{doing}: it is no longer used here", self._file.directory)
        try:
            yield self._device_file
        finally:
            with self._device_lock:
                self._device_users -= 1
                last = self._device_closing and self._device_users == 0
            if last:
                self._close_device()

    def _close_device(self) -> None:
        with self._device_lock:
            file, self._device_file = self._device_file, None
        if file is not None:
            file.close()
            kvikio_setup.settings.leave()


def open_gds_store(directory: str | os.PathLike[str], *, required: bool, **limits: Any) -> GdsStore:
    """A store for device memory in a directory, with GPUDirect Storage where it works.

    Args:
        directory: As `GdsStore`.
        required: Whether it is an error if it does not work, and not a warning.
        **limits: As `GdsStore`.

    Raises:
        ConfigError: It does not work and is required, or the directory cannot be used.
    """
    import torch

    # Asked only where it is known, for asking would start CUDA in this process.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    store = GdsStore(directory, **limits)
    try:
        store.open_device(device, compat=required)
    except GdsRefusedError as refusal:
        if required:
            store.close()
            raise ConfigError(
                f'backend: "gds" was asked for, but GPUDirect Storage does not work in {os.fspath(directory)!r} '
                f'({refusal}); use backend="auto", or see docs/storage.md for what it needs'
            ) from refusal
        warnings.warn(
            _fallback(os.fspath(directory), str(refusal), store.backend), RuntimeWarning, stacklevel=2
        )
    except BaseException:
        store.close()
        raise
    return store


def gds_extra() -> str:
    """The extra of this package with the kvikio for the installed torch."""
    import torch

    return "gds-cu12" if (torch.version.cuda or "").startswith("12.") else "gds-cu13"


def _fallback(directory: str, reason: str, backend: str) -> str:
    """The line that says why device memory goes through host memory."""
    return f"ssdtrain does without GPUDirect Storage in {directory!r} ({backend} instead): {reason}"


class _FromDevice(Edges):
    """A write from device memory. Each byte lies at its place in the file."""


class _CudaBytes:
    """Device memory as kvikio takes it: what cupy and torch call an array."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self.owner = buffer
        self.__cuda_array_interface__ = {
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (buffer.address, False),
            "strides": None,
            "version": 3,
        }


def _probe(file: SpillFile, device: int, *, compat: bool) -> str:
    """Run `gds_probe.py` on a file that has no extents yet.

    Returns:
        "gds" or "gds-compat".
    """
    # cuFile writes its log into the working directory.
    with file.path("cannot try GPUDirect Storage") as (path, fd), tempfile.TemporaryDirectory() as cwd:
        command = [sys.executable, "-P", str(_PROBE), path, str(device), "compat" if compat else "gds"]
        try:
            done = subprocess.run(  # noqa: S603 - our own interpreter and script
                command,
                cwd=cwd,
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PROBE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise GdsRefusedError(f"cuFile did not answer within {PROBE_SECONDS:g} s") from None
        except OSError as error:
            raise GdsRefusedError(f"it cannot be tried ({error})") from error
    answer = (done.stdout.strip().splitlines() or [""])[-1]
    if answer in ("gds", "gds-compat"):
        return answer
    if answer.startswith("no: "):
        raise GdsRefusedError(answer.removeprefix("no: "))
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise GdsRefusedError(f"the process that tried it ended with {done.returncode} ({last})")
