"""What every spill store must do, as tests to subclass.

```
class TestMyStore(SpillStoreSuite):
    @pytest.fixture
    def store(self, tmp_path):
        store = MyStore(tmp_path)
        yield store
        store.close()
```

Needs pytest, which nothing else in this package does.
"""

from __future__ import annotations

import ctypes
import errno
import random
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from ssdtrain.errors import StoreError
from ssdtrain.storage.base import PAGE, Extent, HostBuffer, SpillStore

__all__ = ["SIZES", "SKEWS", "SpillStoreSuite", "filled", "skewed_buffer"]

MIB = 1 << 20

# Around every boundary that a store may have: the byte, the cache line, the sector, the page, the megabyte.
SIZES = (1, 63, 64, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537, MIB + 100, 5 * MIB + 1)

# Of addresses, modulo a page. 64 is what the allocator of torch gives.
SKEWS = (0, 1, 64, 511, 512, 4095)

THREADS = 8


def skewed_buffer(nbytes: int, skew: int = 64, fill: int = 0) -> HostBuffer:
    """A buffer of bytes `fill`, whose address is `skew` modulo a page."""
    memory = ctypes.create_string_buffer(nbytes + 2 * PAGE)
    start = ctypes.addressof(memory)
    buffer = HostBuffer(start + (skew - start) % PAGE, nbytes, memory)
    ctypes.memset(buffer.address, fill, nbytes)
    return buffer


def filled(nbytes: int, seed: int, skew: int = 64) -> HostBuffer:
    """A buffer of random bytes that depend on `seed`."""
    buffer = skewed_buffer(nbytes, skew)
    buffer.view()[:] = random.Random(seed).randbytes(nbytes)  # noqa: S311 - repeatable, not secret
    return buffer


def content(buffer: HostBuffer) -> bytes:
    """The buffer's bytes, as a copy."""
    return ctypes.string_at(buffer.address, buffer.nbytes)


def read_back(store: SpillStore, extent: Extent, nbytes: int, *, skew: int = 64, offset: int = 0) -> bytes:
    """What the store gives, read into memory that held something else."""
    destination = skewed_buffer(nbytes, skew, fill=0xEE)
    store.read(extent, destination, offset)
    return content(destination)


def same(one: bytes, other: bytes) -> bool:
    """Equality, without the megabytes that a failing `assert one == other` would print."""
    return one == other


class SpillStoreSuite(ABC):
    """The contract of `SpillStore`. A subclass gives the store; its tests may go beyond the contract."""

    @pytest.fixture
    @abstractmethod
    def store(self, *args: Any, **kwargs: Any) -> Any:
        """A fresh, empty store with room for at least 64 MiB."""

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_bytes_come_back_as_written(self, store: SpillStore, nbytes: int) -> None:
        """Whole, at the skew of torch's memory."""
        source = filled(nbytes, seed=nbytes)
        extent = store.allocate(nbytes)
        store.write(extent, source)
        assert same(read_back(store, extent, nbytes), content(source))

    @pytest.mark.parametrize("skew", SKEWS)
    def test_any_address_can_be_written_and_read(self, store: SpillStore, skew: int) -> None:
        """Read at the same skew and at every other, for sizes on both sides of a page and a megabyte."""
        for nbytes in (1, 4096, 4097, 65537, 3 * MIB + 100):
            source = filled(nbytes, seed=skew, skew=skew)
            extent = store.allocate(nbytes)
            store.write(extent, source)
            wrong = [s for s in SKEWS if not same(read_back(store, extent, nbytes, skew=s), content(source))]
            store.free(extent)
            assert wrong == []

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_a_read_fills_its_buffer_and_nothing_beside_it(self, store: SpillStore, nbytes: int) -> None:
        """The bytes before and after the destination keep their value."""
        extent = store.allocate(nbytes)
        store.write(extent, filled(nbytes, seed=1))
        around = skewed_buffer(nbytes + 128, skew=0, fill=0xEE)
        for margin in (64, 1):
            store.read(extent, HostBuffer(around.address + margin, nbytes, around))
            assert same(bytes(around.view(0, margin)), b"\xee" * margin)
            assert same(bytes(around.view(nbytes + 64)), b"\xee" * 64)

    def test_a_write_leaves_its_buffer_alone(self, store: SpillStore) -> None:
        """A store never changes memory that it was given to write."""
        source = filled(MIB + 100, seed=2)
        before = content(source)
        store.write(store.allocate(source.nbytes), source)
        assert same(content(source), before)

    def test_memory_may_be_reused_once_written(self, store: SpillStore) -> None:
        """What is read is what the buffer held during the write, head and tail included."""
        source = filled(MIB + 100, seed=3)
        before = content(source)
        extent = store.allocate(source.nbytes)
        store.write(extent, source)
        ctypes.memset(source.address, 0, source.nbytes)
        assert same(read_back(store, extent, source.nbytes), before)

    def test_a_block_can_be_read_twice(self, store: SpillStore) -> None:
        """Reading does not consume."""
        source = filled(MIB + 1, seed=4)
        extent = store.allocate(source.nbytes)
        store.write(extent, source)
        assert all(same(read_back(store, extent, source.nbytes), content(source)) for _ in range(2))

    def test_pieces_are_read_as_they_were_written(self, store: SpillStore) -> None:
        """A block in pieces of a megabyte and a rest, written and read in different orders."""
        whole = filled(3 * MIB + 4321, seed=5)
        pieces = [(at, min(MIB, whole.nbytes - at)) for at in range(0, whole.nbytes, MIB)]
        extent = store.allocate(whole.nbytes)
        for at, length in reversed(pieces):
            store.write(extent, HostBuffer(whole.address + at, length, whole), at)
        got = b"".join(read_back(store, extent, length, skew=512, offset=at) for at, length in pieces)
        assert same(got, content(whole))

    def test_neighbours_are_not_overwritten(self, store: SpillStore) -> None:
        """Blocks of all sizes side by side, the middle ones rewritten after the outer ones."""
        sources = [filled(nbytes, seed=nbytes, skew=skew) for nbytes in SIZES for skew in (0, 64)]
        extents = [store.allocate(source.nbytes) for source in sources]
        for first in (0, 1):
            for source, extent in list(zip(sources, extents, strict=True))[first::2]:
                store.write(extent, source)
        wrong = [
            source.nbytes
            for source, extent in zip(sources, extents, strict=True)
            if not same(read_back(store, extent, source.nbytes), content(source))
        ]
        assert wrong == []

    def test_freed_room_is_given_out_again(self, store: SpillStore) -> None:
        """A hundred times as many bytes pass through as are live at one time."""
        for seed in range(100):
            source = filled(MIB // 2 + seed, seed=seed)
            extent = store.allocate(source.nbytes)
            store.write(extent, source)
            assert same(read_back(store, extent, source.nbytes), content(source))
            store.free(extent)
            assert store.live_bytes == 0

    def test_live_bytes_count_what_is_not_freed(self, store: SpillStore) -> None:
        """Up with every allocation by at least its bytes and less than a page more, down to zero again."""
        extents = []
        for nbytes in SIZES:
            before = store.live_bytes
            extents.append(store.allocate(nbytes))
            assert nbytes <= store.live_bytes - before < nbytes + PAGE
        for extent in extents:
            before = store.live_bytes
            store.free(extent)
            assert before - store.live_bytes == extent.length
        assert store.live_bytes == 0

    def test_what_was_never_written_cannot_be_read(self, store: SpillStore) -> None:
        """An error, not zeros and not what lay there before."""
        extent = store.allocate(MIB)
        with pytest.raises(StoreError):
            store.read(extent, skewed_buffer(MIB))

    @pytest.mark.parametrize("nbytes", [100, 100_000])
    def test_a_read_of_another_length_is_refused(self, store: SpillStore, nbytes: int) -> None:
        """A piece is read as it was written, or not at all."""
        extent = store.allocate(200_000)
        store.write(extent, filled(nbytes, seed=8))
        for length in (nbytes - 1, nbytes + 1, nbytes // 2):
            with pytest.raises(StoreError):
                store.read(extent, skewed_buffer(length))

    def test_borrowed_memory_that_is_filled_is_written(self, store: SpillStore) -> None:
        """As one write of the whole extent. A store may lend none."""
        source = filled(MIB + 100, seed=9)
        extent = store.allocate(source.nbytes)
        with store.borrow(extent, write=True) as memory:
            if memory is None:
                return
            assert memory.nbytes == source.nbytes
            assert memory.address % PAGE == 0
            memory.view()[:] = source.view()
        assert same(read_back(store, extent, source.nbytes), content(source))

    def test_borrowed_memory_holds_what_was_written(self, store: SpillStore) -> None:
        """In pieces, too. A store may lend none."""
        source = filled(MIB + 100, seed=10)
        extent = store.allocate(source.nbytes)
        store.write(extent, HostBuffer(source.address + MIB, 100, source), MIB)
        store.write(extent, HostBuffer(source.address, MIB, source))
        with store.borrow(extent, write=False) as memory:
            assert memory is None or same(content(memory), content(source))

    def test_borrowed_memory_that_was_not_filled_cannot_be_read(self, store: SpillStore) -> None:
        """Where the context ends with an error, and where it was never entered."""
        extent = store.allocate(MIB)
        store.write(extent, filled(MIB, seed=11))
        with suppress(ZeroDivisionError), store.borrow(extent, write=True) as memory:
            if memory is None:
                return
            raise ZeroDivisionError
        for unfilled in (extent, store.allocate(MIB)):
            with pytest.raises(StoreError):
                store.read(unfilled, skewed_buffer(MIB))
            with pytest.raises(StoreError), store.borrow(unfilled, write=False):
                pass

    def test_a_closed_store_lends_nothing(self, store: SpillStore) -> None:
        """It refuses, or has nothing to lend."""
        extent = store.allocate(MIB)
        store.close()
        with suppress(StoreError), store.borrow(extent, write=True) as memory:
            assert memory is None

    def test_threads_do_not_disturb_each_other(self, store: SpillStore) -> None:
        """Many blocks at once, each thread with its own, read and freed in a mixed order."""
        start = threading.Barrier(THREADS)

        def work(thread: int) -> int:
            start.wait()
            wrong, kept = 0, []
            for turn, nbytes in enumerate((MIB + 100, 4097, 64, 300_000, 65536, 513)):
                source = filled(nbytes, seed=thread * 100 + turn, skew=SKEWS[(thread + turn) % len(SKEWS)])
                extent = store.allocate(nbytes)
                store.write(extent, source)
                kept.append((extent, source))
                if turn % 2:
                    extent, source = kept.pop(0)
                    wrong += not same(read_back(store, extent, source.nbytes), content(source))
                    store.free(extent)
            for extent, source in kept:
                wrong += not same(read_back(store, extent, source.nbytes), content(source))
                store.free(extent)
            return wrong

        with ThreadPoolExecutor(THREADS) as pool:
            assert sum(pool.map(work, range(THREADS))) == 0
        assert store.live_bytes == 0

    def test_live_extents_are_disjoint_and_aligned(self, store: SpillStore) -> None:
        """For each member: also after a third of them was freed and given out again in other sizes."""
        extents = [store.allocate(nbytes) for nbytes in SIZES * 3]
        for extent in extents[::3]:
            store.free(extent)
        extents = [extent for at, extent in enumerate(extents) if at % 3] + [store.allocate(n) for n in SIZES]
        assert all(e.offset % PAGE == 0 and e.length % PAGE == 0 and e.length >= e.nbytes for e in extents)
        ranges = sorted((e.member, e.offset, e.offset + e.length) for e in extents)
        overlaps = [pair for pair in pairwise(ranges) if pair[0][0] == pair[1][0] and pair[0][2] > pair[1][1]]
        assert overlaps == []

    def test_closing_twice_is_harmless(self, store: SpillStore) -> None:
        """Idempotent, also with blocks that nobody freed."""
        store.write(store.allocate(4096), filled(4096, seed=6))
        store.close()
        store.close()

    def test_free_after_close_does_nothing(self, store: SpillStore) -> None:
        """Handles may outlive the store."""
        extent = store.allocate(4096)
        store.close()
        store.free(extent)

    def test_a_closed_store_refuses_work(self, store: SpillStore) -> None:
        """Every operation, with EBADF."""
        source = filled(4096, seed=7)
        extent = store.allocate(4096)
        store.write(extent, source)
        store.close()
        for operation in (
            lambda: store.allocate(4096),
            lambda: store.write(extent, source),
            lambda: store.read(extent, source),
        ):
            with pytest.raises(StoreError) as caught:
                operation()
            assert caught.value.errno == errno.EBADF

    def test_an_extent_can_be_described(self, store: SpillStore) -> None:
        """One line with offset and length, for errors."""
        extent = store.allocate(12345)
        text = store.describe(extent)
        assert str(extent.offset) in text
        assert "12345" in text
        assert "\n" not in text
        assert store.location(extent)
