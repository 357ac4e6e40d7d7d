"""Opens a spill file: without a name, tried by a real write, or an error that says what to do."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ssdtrain.errors import ConfigError
from ssdtrain.storage import linux
from ssdtrain.storage.base import PAGE
from ssdtrain.storage.bounce import page_aligned

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["open_spill_file"]

# No other way of opening or writing would do better on these.
_FINAL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
)


class _DirectRefusedError(OSError):
    """The directory's file system does not do direct I/O."""


def open_spill_file(directory: str, direct: bool | None) -> tuple[int, bool]:
    """Open a nameless file in `directory`, and write and read one page of it.

    Args:
        directory: An existing, writable directory.
        direct: Whether O_DIRECT is a must (True), not wanted (False), or used where it works (None).

    Returns:
        The descriptor of the empty file, and whether it is O_DIRECT.

    Raises:
        ConfigError: One line that names the option, what came and what to do.
    """
    if not directory or "\0" in directory:
        raise ConfigError(f"spill_dir: expected a directory, got {directory!r}")
    refusal = "this system has no O_DIRECT"
    try:
        if direct is not False and hasattr(os, "O_DIRECT"):
            try:
                return _probed(directory, os.O_DIRECT, _check_direct), True
            except OSError as error:
                if error.errno in _FINAL:
                    raise
                refusal = error.strerror or str(error)
        if direct:
            raise ConfigError(
                f'backend: "direct" was asked for, but {directory!r} refuses O_DIRECT ({refusal}); '
                'use backend="auto" or a directory on a local disk'
            )
        return _probed(directory, 0, lambda _fd: None), False
    except OSError as error:
        raise ConfigError(
            f"spill_dir: {directory!r}{_origin(directory)} {_reason(directory, error)}"
        ) from error


def _origin(directory: str) -> str:
    named = os.environ.get("SSDTRAIN_SPILL_DIR", "").split(":")
    return " (from $SSDTRAIN_SPILL_DIR)" if directory in named else ""


def _reason(directory: str, error: OSError) -> str:
    match error.errno:
        # Of /proc and its like, which are there and hold no files, it would be the file that does not exist.
        case errno.ENOENT if not Path(directory).exists():
            return "does not exist; create it, or name another directory on an SSD"
        case errno.ENOTDIR:
            return "is not a directory; name a directory on an SSD"
        case errno.EACCES | errno.EPERM:
            return "is not writable by this user; change its permissions, or name another directory"
        case errno.EROFS:
            return "is on a read-only file system; name a directory on a writable one"
        case errno.ENOSPC | errno.EDQUOT:
            return f"has no room ({error.strerror}); free some space, or name another directory"
        case _:
            return f"cannot hold a spill file ({error.strerror or error}); name another directory"


def _probed(directory: str, flags: int, check: Callable[[int], None]) -> int:
    fd = _open_nameless(directory, flags)
    try:
        check(fd)
        _probe(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_direct(fd: int) -> None:
    alignment = linux.direct_alignment(fd)
    if alignment is None:
        return
    # Zero is a file that opens with O_DIRECT and then goes through the page cache in silence.
    if 0 in alignment:
        raise _DirectRefusedError(errno.EINVAL, "statx says that direct I/O is not supported")
    if max(alignment) > PAGE:
        raise _DirectRefusedError(
            errno.EINVAL, f"it needs an alignment of {max(alignment)}, more than {PAGE} bytes"
        )


def _probe(fd: int) -> None:
    """One real write and read: some file systems accept O_DIRECT at open and fail here."""
    sent, received = page_aligned(PAGE), page_aligned(PAGE)
    pattern = bytes(range(256)) * (PAGE // 256)
    sent.view()[:] = pattern
    written = os.pwrite(fd, sent.view(), 0)
    read = os.preadv(fd, [received.view()], 0) if written == PAGE else 0
    if read != PAGE or bytes(received.view()) != pattern:
        raise OSError(errno.EIO, "a probe write of one page was not read back")
    os.ftruncate(fd, 0)


def _open_nameless(directory: str, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    tmpfile = getattr(os, "O_TMPFILE", None)
    if tmpfile is not None:
        try:
            return os.open(directory, tmpfile | flags, 0o600)
        except OSError as error:
            # EISDIR: a kernel without O_TMPFILE. EINVAL may mean O_DIRECT as well; the named file will tell.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS):
                raise
    return _open_and_unlink(directory, flags)


def _open_and_unlink(directory: str, flags: int) -> int:
    # The name is seen only if the process dies between two system calls; it says then whose file it was.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "").replace("/", "_") or str(os.getpid())
    rank = os.environ.get("RANK", "0").replace("/", "_")
    path = Path(directory, f"ssdtrain-{run[:64]}-rank{rank[:16]}-{secrets.token_hex(8)}.spill")
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | flags, 0o600)
    except OSError as error:
        # Some file systems create the file first and refuse O_DIRECT then.
        if error.errno != errno.EEXIST:
            with suppress(OSError):
                path.unlink()
        raise
    try:
        path.unlink()
    except OSError:
        os.close(fd)
        raise
    return fd
