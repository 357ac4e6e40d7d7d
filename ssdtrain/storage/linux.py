"""What Linux knows of files and the os module does not offer: alignment, preallocation, what is RAM."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["DirectAlignment", "allocate_blocks", "direct_alignment", "filesystem_type", "flush_range"]

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_SYNC_FILE_RANGE_WRITE_AND_WAIT = 1 | 2 | 4
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE)


class _Statx(ctypes.Structure):
    # The layout is the kernel's and the same on every architecture; only the fields that are read have names.
    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("_until_dio_mem_align", ctypes.c_uint8 * 148),
        ("dio_mem_align", ctypes.c_uint32),
        ("dio_offset_align", ctypes.c_uint32),
        ("_rest", ctypes.c_uint8 * 96),
    )


class DirectAlignment(NamedTuple):
    """What a file asks of direct I/O, in bytes; 0 means that it has none."""

    memory: int
    offset: int


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def direct_alignment(fd: int) -> DirectAlignment | None:
    """What `statx` says of direct I/O on an open file; None where kernel, libc or file system say nothing."""
    statx = getattr(_libc(), "statx", None)
    if statx is None:
        return None
    answer = _Statx()
    failed = statx(
        ctypes.c_int(fd),
        ctypes.c_char_p(b""),
        ctypes.c_int(_AT_EMPTY_PATH),
        ctypes.c_uint(_STATX_DIOALIGN),
        ctypes.byref(answer),
    )
    if failed or not answer.mask & _STATX_DIOALIGN:
        return None
    return DirectAlignment(answer.dio_mem_align, answer.dio_offset_align)


def allocate_blocks(fd: int, offset: int, length: int) -> bool:
    """Reserve disk blocks for a range and extend the file over it.

    `os.posix_fallocate` is not used: where the file system cannot reserve, libc imitates it by writing into
    every block, slowly and in a way that O_DIRECT refuses.

    Returns:
        False where libc or the file system cannot reserve; the file is as it was.

    Raises:
        OSError: ENOSPC, EDQUOT, EFBIG, EIO.
    """
    fallocate = getattr(_libc(), "fallocate", None)
    if fallocate is None:
        return False
    while fallocate(ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(offset), ctypes.c_int64(length)):
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def flush_range(fd: int, offset: int, length: int) -> None:
    """Write the dirty pages of a range to the disk and wait for it.

    `sync_file_range` is preferred to `fdatasync`, which would wait for the other threads' ranges too and
    flush the disk's own cache: spilled bytes need to leave memory, not to survive a power cut.

    Raises:
        OSError: Writing failed.
    """
    sync_file_range = getattr(_libc(), "sync_file_range", None)
    if sync_file_range is None:
        os.fdatasync(fd)
        return
    while sync_file_range(
        ctypes.c_int(fd),
        ctypes.c_int64(offset),
        ctypes.c_int64(length),
        ctypes.c_uint(_SYNC_FILE_RANGE_WRITE_AND_WAIT),
    ):
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            os.fdatasync(fd)
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def filesystem_type(fd: int) -> str:
    """The type of the file system that holds an open file, such as "tmpfs"; "" if it cannot be told."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        if source and mount.split()[2] == wanted:
            return source.split()[0]
    return ""
