"""Which bytes of a spill file are taken. Arithmetic only: no file, no lock; the owner brings both."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

__all__ = ["ExtentAllocator", "ShrinkPolicy"]


class ExtentAllocator:
    """Best fit over the free ranges of a file that grows at its end. Not thread-safe.

    [Note: best fit] A training step frees and asks for the same few sizes again and again, and best fit hands
    the hole that one left to the next of its size: the file stays near the peak of live bytes and its blocks
    are rewritten in place. Ties go to the lowest offset, so that free space gathers at the end, where it can
    be cut off.

    A free range is known three ways: by length to choose one, by start and by end to merge it with its
    neighbours. Looking up is a bisection or a dictionary access; inserting moves part of one flat list, 80 kB
    at 10,000 ranges.

    Args:
        alignment: Every offset and length is a multiple of it.
    """

    def __init__(self, alignment: int = 4096) -> None:
        assert alignment > 0
        self.alignment = alignment
        self.size = 0
        self.live_bytes = 0
        self.high_water = 0
        self._live: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self._length_at: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}

    @property
    def live_count(self) -> int:
        """How many extents are not freed."""
        return len(self._live)

    @property
    def trailing_free(self) -> int:
        """Free bytes at the end of the file."""
        start = self._start_by_end.get(self.size)
        return 0 if start is None else self.size - start

    def rounded(self, nbytes: int) -> int:
        """`nbytes` rounded up to the alignment."""
        return -(-nbytes // self.alignment) * self.alignment

    def missing(self, nbytes: int) -> int:
        """By how much the file has to grow at least for `nbytes` to fit at its end."""
        return max(0, self.rounded(nbytes) - self.trailing_free)

    def allocate(self, nbytes: int) -> int | None:
        """Take room for `nbytes`.

        Returns:
            The offset, or None when no free range is long enough.
        """
        assert nbytes > 0
        length = self.rounded(nbytes)
        at = bisect_left(self._by_length, (length, 0))
        if at == len(self._by_length):
            return None
        available, offset = self._by_length.pop(at)
        self._forget(offset, available)
        if available > length:
            self._remember(offset + length, available - length)
        self._live[offset] = length
        self.live_bytes += length
        self.high_water = max(self.high_water, offset + length)
        return offset

    def free(self, offset: int) -> None:
        """Give back what `allocate` returned, and merge it with the free ranges beside it."""
        length = self._live.pop(offset)
        self.live_bytes -= length
        self._add_free(offset, length)

    def grow(self, nbytes: int) -> None:
        """The file became longer by `nbytes`, a multiple of the alignment."""
        assert nbytes > 0
        assert nbytes % self.alignment == 0
        end = self.size
        self.size += nbytes
        self._add_free(end, nbytes)

    def leave_gap(self) -> None:
        """The file became longer by a unit that nobody gets: what is free before and after it is never one range."""
        self.size += self.alignment

    def shrink(self, size: int) -> None:
        """The file is cut to `size`, a multiple of the alignment, which takes free bytes only."""
        assert size % self.alignment == 0
        if size >= self.size:
            return
        assert size >= self.size - self.trailing_free
        start = self._start_by_end[self.size]
        self._take_out(start)
        self.size = size
        if size > start:
            self._remember(start, size - start)

    def reset_high_water(self) -> None:
        """Forget how far extents have reached, and begin anew from what is free now at the end."""
        self.high_water = self.size - self.trailing_free

    def free_ranges(self) -> list[tuple[int, int]]:
        """The free ranges as (offset, length), by offset."""
        return sorted(self._length_at.items())

    def live_ranges(self) -> list[tuple[int, int]]:
        """The extents that are not freed as (offset, length), by offset."""
        return sorted(self._live.items())

    def _add_free(self, start: int, length: int) -> None:
        before = self._start_by_end.get(start)
        if before is not None:
            length += self._take_out(before)
            start = before
        if start + length in self._length_at:
            length += self._take_out(start + length)
        self._remember(start, length)

    def _take_out(self, start: int) -> int:
        length = self._length_at[start]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        self._forget(start, length)
        return length

    def _remember(self, start: int, length: int) -> None:
        insort(self._by_length, (length, start))
        self._length_at[start] = length
        self._start_by_end[start + length] = start

    def _forget(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_by_end[start + length]


class ShrinkPolicy:
    """When a spill file is to be cut: its last cycles, from empty to empty, all needed far less than it has.

    A file keeps its size while steps repeat: on ext4 a block that was written before is rewritten about a
    fifth faster than a fresh one, which has to be marked as written. A larger phase that is over (a longer
    sequence length, say) must not keep its disk space for the rest of the run.

    Args:
        cycles: How many cycles must agree.
        step: The file is cut to a multiple of this.
    """

    def __init__(self, cycles: int, step: int) -> None:
        self._step = step
        self._peaks: deque[int] = deque(maxlen=cycles)

    def record(self, peak: int) -> None:
        """A cycle ended that used the file up to `peak`."""
        self._peaks.append(peak)

    def target(self, size: int) -> int:
        """The size that a file of `size` should have: less only when more than half would go."""
        if len(self._peaks) < (self._peaks.maxlen or 0):
            return size
        enough = -(-max(self._peaks) // self._step) * self._step
        return enough if enough < size // 2 else size
