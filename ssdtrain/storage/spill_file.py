"""One nameless file in a spill directory, and reads and writes that are whole or raise."""

from __future__ import annotations

import errno
import os
import resource
import threading
import warnings
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ssdtrain.errors import StoreError
from ssdtrain.storage import linux
from ssdtrain.storage.base import PAGE
from ssdtrain.storage.opening import open_spill_file

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SpillFile"]

_RAM_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


class SpillFile:
    """A file without a name, mode 0600, gone when its descriptor is closed, however the process ends.

    Args:
        directory: An existing, writable directory.
        direct: True asks for O_DIRECT and raises without it, False for buffered I/O, None for O_DIRECT where
            a real write and read succeed with it and buffered I/O elsewhere.

    Attributes:
        directory: As it was given.
        direct: Whether O_DIRECT is in use. Then memory, offsets and lengths have to be multiples of `PAGE`.

    Raises:
        ConfigError: The directory cannot be used, or not as asked.
    """

    def __init__(self, directory: str | os.PathLike[str], direct: bool | None = None) -> None:
        self.directory = os.fspath(directory)
        # Guards `_fd` and `_users`: the last one out closes, so that no call meets a descriptor number that
        # the system has given to somebody else's file.
        self._descriptor_lock = threading.Lock()
        self._users = 0
        self._fd, self.direct = open_spill_file(self.directory, direct)
        # For an owner that forgot to close.
        self._abandoned = weakref.finalize(self, os.close, self._fd)
        self._abandoned.atexit = False
        self._closing = False
        kind = linux.filesystem_type(self._fd)
        if kind in _RAM_FILESYSTEMS:
            warnings.warn(
                f"spill_dir: {self.directory!r} is {kind}, which is RAM: spilling there gains nothing; "
                "name a directory on an SSD",
                stacklevel=3,
            )

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of `view` at `offset`.

        Raises:
            StoreError: Not all bytes were written.
        """
        doing = f"cannot write {len(view)} bytes at offset {offset} of the spill file"
        with self._descriptor(doing) as fd:
            self._write_all(fd, view, offset)
            if not self.direct:
                # Only clean pages can be dropped from memory.
                linux.flush_range(fd, offset, len(view))
                _drop_pages(fd, offset, len(view))

    def read(self, view: memoryview, offset: int) -> None:
        """Fill all of `view` from `offset`.

        Raises:
            StoreError: Not all bytes were read.
        """
        doing = f"cannot read {len(view)} bytes at offset {offset} of the spill file"
        with self._descriptor(doing) as fd:
            done = 0
            while done < len(view):
                start = self._restart(done)
                count = os.preadv(fd, [view[start:]], offset + start)
                if start + count <= done:
                    raise StoreError(errno.EIO, f"{doing}: it ends after {done} bytes", self.directory)
                done = start + count
            if not self.direct:
                _drop_pages(fd, offset, len(view))

    def grow(self, size: int, new_size: int, doing: str) -> None:
        """Extend the file from `size` to `new_size` bytes, and reserve blocks where the file system can.

        Args:
            size: Its size now.
            new_size: Its size then.
            doing: What for, as the beginning of an error's text.

        Raises:
            StoreError: There is no room; the file is as it was.
        """
        with self._descriptor(doing) as fd:
            try:
                if not linux.allocate_blocks(fd, size, new_size - size):
                    os.ftruncate(fd, new_size)
            except OSError:
                # What was reserved before the room ran out.
                with suppress(OSError):
                    os.ftruncate(fd, size)
                raise

    def shrink(self, new_size: int) -> None:
        """Cut the file to `new_size` bytes and give its blocks back.

        Raises:
            StoreError: The system refused.
        """
        with self._descriptor(f"cannot cut the spill file to {new_size} bytes") as fd:
            os.ftruncate(fd, new_size)

    def free_bytes(self) -> int:
        """Bytes of the file system that are free for this user.

        Raises:
            StoreError: The system does not say.
        """
        with self._descriptor("cannot ask for the free bytes") as fd:
            answer = os.fstatvfs(fd)
        return answer.f_bavail * answer.f_frsize

    def lacks_room(self, nbytes: int) -> bool:
        """Whether a write of so many bytes can have failed for want of room: the file has holes and the disk no more.

        For libraries whose errors do not say.

        Raises:
            StoreError: The system does not say.
        """
        with self._descriptor("cannot ask for the file's blocks") as fd:
            status = os.fstat(fd)
        return status.st_blocks * 512 < status.st_size and self.free_bytes() < nbytes

    @contextmanager
    def path(self, doing: str) -> Iterator[tuple[str, int]]:
        """A path by which a library can open the file once more, and the descriptor; valid inside the context."""
        with self._descriptor(doing) as fd:
            yield f"/proc/self/fd/{fd}", fd

    def close(self) -> None:
        """Close the file, which frees its disk space; waits for nobody. Idempotent, also after a failure.

        Raises:
            StoreError: The system reported an error on closing; the file is closed all the same.
        """
        with self._descriptor_lock:
            self._closing = True
            last = self._users == 0
        if last:
            self._close_descriptor()

    @contextmanager
    def _descriptor(self, doing: str) -> Iterator[int]:
        with self._descriptor_lock:
            usable = not self._closing
            self._users += usable
        if not usable:
            raise StoreError(errno.EBADF, f"{doing}: the store is closed", self.directory)
        try:
            yield self._fd
        except StoreError:
            raise
        except OSError as error:
            raise StoreError.from_os(error, doing, self.directory) from error
        finally:
            with self._descriptor_lock:
                self._users -= 1
                last = self._closing and self._users == 0
            if last:
                self._close_descriptor()

    def _close_descriptor(self) -> None:
        # Whoever gets the finalizer closes; the number is not used again, whatever close() says.
        if self._abandoned.detach() is None:
            return
        try:
            os.close(self._fd)
        except OSError as error:
            raise StoreError.from_os(error, "cannot close the spill file", self.directory) from error

    def _restart(self, done: int) -> int:
        """Where the rest of a short transfer begins: O_DIRECT takes none but aligned positions."""
        return done - done % PAGE if self.direct else done

    def _write_all(self, fd: int, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            start = self._restart(done)
            try:
                count = os.pwrite(fd, view[start:], offset + start)
            except OSError as error:
                if error.errno == errno.EINVAL and _is_over_limit(offset + len(view)):
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG)) from error
                raise
            if start + count <= done:
                code = errno.EFBIG if _is_over_limit(offset + len(view)) else errno.EIO
                raise OSError(code, f"short write, only {done} bytes were taken: {os.strerror(code)}")
            done = start + count


def _is_over_limit(end: int) -> bool:
    """Whether a write up to `end` goes over the process's file size limit.

    The kernel cuts such a write at the limit, and direct I/O then takes a length that is no multiple of its
    alignment for an invalid argument: nothing tells the reason but the limit itself.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return limit != resource.RLIM_INFINITY and end > limit


def _drop_pages(fd: int, offset: int, length: int) -> None:
    # Whole pages only are dropped, and the extent is whole pages.
    os.posix_fadvise(fd, offset, -(-length // PAGE) * PAGE, os.POSIX_FADV_DONTNEED)
