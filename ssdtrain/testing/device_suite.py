"""What every store that moves device memory must do, as tests to subclass, on top of `SpillStoreSuite`.

```
class TestMyStore(DeviceStoreSuite):
    @pytest.fixture
    def store(self, tmp_path):
        store = MyStore(tmp_path)
        yield store
        store.close()

    @pytest.fixture
    def memory(self):
        return MyMemory          # MyMemory(nbytes, device=0, skew=0)
```

Needs pytest.
"""

from __future__ import annotations

import errno
import random
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from ssdtrain.errors import StoreError
from ssdtrain.testing.suite import MIB, SIZES, SKEWS, content, filled, read_back, same

if TYPE_CHECKING:
    from ssdtrain.storage.base import DeviceBuffer, DeviceStore, Extent, SpillStore

__all__ = ["DeviceMemory", "DeviceStoreSuite", "MemoryMaker"]

THREADS = 8


class DeviceMemory(Protocol):
    """Memory of a device that a test can fill and look at."""

    @property
    def buffer(self) -> DeviceBuffer:
        """All of it."""

    def fill(self, content: bytes) -> None:
        """Set its bytes."""

    def content(self) -> bytes:
        """Its bytes."""


class MemoryMaker(Protocol):
    """Makes device memory of any length, whose address is `skew` modulo a page."""

    def __call__(self, nbytes: int, *, device: int = 0, skew: int = 0) -> DeviceMemory:
        """Fresh memory."""


def device_store(store: SpillStore, extent: Extent) -> DeviceStore:
    """The extent's, which there has to be."""
    inner = store.device_store(extent)
    assert inner is not None
    return inner


class DeviceStoreSuite(ABC):
    """The contract of `DeviceStore`, and of one store with two ways to the same extents."""

    @pytest.fixture
    @abstractmethod
    def store(self, *args: Any, **kwargs: Any) -> Any:
        """A fresh, empty store with room for at least 64 MiB."""

    @pytest.fixture
    @abstractmethod
    def memory(self, *args: Any, **kwargs: Any) -> Any:
        """A `MemoryMaker`."""

    def random_bytes(self, nbytes: int, seed: int) -> bytes:
        """Bytes that depend on `seed`."""
        return random.Random(seed).randbytes(nbytes)  # noqa: S311 - repeatable, not secret

    def write(self, store: SpillStore, data: bytes, memory: MemoryMaker, **where: int) -> Extent:
        """A new extent, written from device memory that is overwritten afterwards."""
        source = memory(len(data), **where)
        source.fill(data)
        extent = store.allocate(len(data))
        device_store(store, extent).write_device(extent, source.buffer)
        source.fill(bytes(len(data)))
        return extent

    def read(self, store: SpillStore, extent: Extent, memory: MemoryMaker, **where: int) -> bytes:
        """An extent's bytes, read into device memory that held something else."""
        destination = memory(extent.nbytes, **where)
        destination.fill(b"\xee" * extent.nbytes)
        device_store(store, extent).read_device(extent, destination.buffer)
        return destination.content()

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_bytes_come_back_as_written(self, store: SpillStore, memory: MemoryMaker, nbytes: int) -> None:
        """On both sides of every boundary."""
        data = self.random_bytes(nbytes, seed=nbytes)
        assert same(self.read(store, self.write(store, data, memory), memory), data)

    def test_every_length_up_to_a_page_and_a_byte_comes_back(
        self, store: SpillStore, memory: MemoryMaker
    ) -> None:
        """Every seventh, which meets each remainder modulo a sector."""
        wrong = []
        for nbytes in (*range(1, 4097, 7), 4097):
            data = self.random_bytes(nbytes, seed=nbytes)
            extent = self.write(store, data, memory)
            if not same(self.read(store, extent, memory), data):
                wrong.append(nbytes)
            store.free(extent)
        assert wrong == []

    @pytest.mark.parametrize("skew", SKEWS)
    def test_any_address_can_be_written_and_read(
        self, store: SpillStore, memory: MemoryMaker, skew: int
    ) -> None:
        """From one, into another."""
        for nbytes in (1, 4096, 4097, 65537, 3 * MIB + 100):
            data = self.random_bytes(nbytes, seed=skew)
            extent = self.write(store, data, memory, skew=skew)
            assert same(self.read(store, extent, memory, skew=512 - skew if skew < 512 else 0), data)
            store.free(extent)

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_a_read_fills_its_buffer_and_nothing_beside_it(
        self, store: SpillStore, memory: MemoryMaker, nbytes: int
    ) -> None:
        """The bytes before and after the destination keep their value."""
        data = self.random_bytes(nbytes, seed=1)
        extent = self.write(store, data, memory)
        around = memory(nbytes + 128)
        around.fill(b"\xee" * (nbytes + 128))
        middle = around.buffer._replace(address=around.buffer.address + 64, nbytes=nbytes)
        device_store(store, extent).read_device(extent, middle)
        assert same(around.content(), b"\xee" * 64 + data + b"\xee" * 64)

    def test_a_write_leaves_its_buffer_alone(self, store: SpillStore, memory: MemoryMaker) -> None:
        """A store never changes memory that it was given to write."""
        data = self.random_bytes(MIB + 100, seed=2)
        source = memory(len(data))
        source.fill(data)
        extent = store.allocate(len(data))
        device_store(store, extent).write_device(extent, source.buffer)
        assert same(source.content(), data)

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_what_a_device_wrote_can_be_read_by_the_host(
        self, store: SpillStore, memory: MemoryMaker, nbytes: int
    ) -> None:
        """At once, whatever has reached the disk, and at every alignment."""
        data = self.random_bytes(nbytes, seed=nbytes)
        extent = self.write(store, data, memory)
        assert all(same(read_back(store, extent, nbytes, skew=skew), data) for skew in SKEWS)

    @pytest.mark.parametrize("skew", SKEWS)
    def test_what_the_host_wrote_can_be_read_by_a_device_or_is_refused_before(
        self, store: SpillStore, memory: MemoryMaker, skew: int
    ) -> None:
        """Never in part: a store may keep what did not fit its alignment in host memory."""
        for nbytes in SIZES:
            source = filled(nbytes, seed=nbytes, skew=skew)
            extent = store.allocate(nbytes)
            store.write(extent, source)
            if store.device_store(extent) is not None:
                assert same(self.read(store, extent, memory), content(source))
            store.free(extent)

    def test_aligned_host_memory_can_be_read_by_a_device(
        self, store: SpillStore, memory: MemoryMaker
    ) -> None:
        """What staging buffers are: whole pages."""
        source = filled(MIB, seed=3, skew=0)
        extent = store.allocate(MIB)
        store.write(extent, source)
        assert same(self.read(store, extent, memory), content(source))

    def test_room_changes_hands_between_host_and_device(self, store: SpillStore, memory: MemoryMaker) -> None:
        """What lay there before, in whichever cache, is not seen again."""
        for turn in range(20):
            nbytes = 300_000 + turn * 4099
            if turn % 2:
                source = filled(nbytes, seed=turn, skew=64)
                extent = store.allocate(nbytes)
                store.write(extent, source)
                data = content(source)
            else:
                data = self.random_bytes(nbytes, seed=turn)
                extent = self.write(store, data, memory)
            assert same(read_back(store, extent, nbytes), data)
            store.free(extent)

    def test_pieces_are_read_as_they_were_written(self, store: SpillStore, memory: MemoryMaker) -> None:
        """A block in pieces of a megabyte and a rest, the last one first, read by the host and by the device."""
        data = self.random_bytes(3 * MIB + 4321, seed=5)
        whole = memory(len(data))
        whole.fill(data)
        pieces = [(at, min(MIB, len(data) - at)) for at in range(0, len(data), MIB)]
        extent = store.allocate(len(data))

        def part(at: int, length: int) -> DeviceBuffer:
            return whole.buffer._replace(address=whole.buffer.address + at, nbytes=length)

        for at, length in reversed(pieces):
            device_store(store, extent).write_device(extent, part(at, length), at)
        whole.fill(bytes(len(data)))
        got = b"".join(read_back(store, extent, length, offset=at) for at, length in pieces)
        assert same(got, data)
        for at, length in pieces:
            device_store(store, extent).read_device(extent, part(at, length), at)
        assert same(whole.content(), data)

    def test_what_was_never_written_cannot_be_read(self, store: SpillStore, memory: MemoryMaker) -> None:
        """An error, not zeros and not what lay there before."""
        extent = store.allocate(MIB)
        with pytest.raises(StoreError):
            device_store(store, extent).read_device(extent, memory(MIB).buffer)

    def test_a_read_beyond_what_was_written_is_refused(self, store: SpillStore, memory: MemoryMaker) -> None:
        """By the device and by the host, from its beginning and behind its end."""
        extent = store.allocate(200_000)
        source = memory(100_000)
        device_store(store, extent).write_device(extent, source.buffer)
        for length, offset in ((100_001, 0), (150_000, 0), (4096, 25 * 4096)):
            with pytest.raises(StoreError):
                device_store(store, extent).read_device(extent, memory(length).buffer, offset)
            with pytest.raises(StoreError):
                read_back(store, extent, length, offset=offset)

    @pytest.mark.parametrize("length", [4096, 12288, MIB])
    def test_the_host_can_read_any_piece_of_what_a_device_wrote(
        self, store: SpillStore, memory: MemoryMaker, length: int
    ) -> None:
        """So that a device store that fails can be done without."""
        data = self.random_bytes(3 * MIB + 4321, seed=9)
        extent = self.write(store, data, memory)
        pieces = [(at, min(length, len(data) - at)) for at in range(0, len(data), length)]
        assert same(b"".join(read_back(store, extent, count, offset=at) for at, count in pieces), data)

    def test_threads_do_not_disturb_each_other(self, store: SpillStore, memory: MemoryMaker) -> None:
        """Many blocks at once, each thread with its own, by the device and by the host."""
        start = threading.Barrier(THREADS)

        def work(thread: int) -> int:
            start.wait()
            wrong, kept = 0, []
            for turn, nbytes in enumerate((MIB + 100, 4097, 64, 300_000, 65536, 513)):
                data = self.random_bytes(nbytes, seed=thread * 100 + turn)
                kept.append((self.write(store, data, memory), data))
                if turn % 2:
                    extent, data = kept.pop(0)
                    wrong += not same(self.read(store, extent, memory), data)
                    store.free(extent)
            for extent, data in kept:
                wrong += not same(read_back(store, extent, len(data)), data)
                store.free(extent)
            return wrong

        with ThreadPoolExecutor(THREADS) as pool:
            assert sum(pool.map(work, range(THREADS))) == 0
        assert store.live_bytes == 0

    def test_a_closed_store_refuses_work(self, store: SpillStore, memory: MemoryMaker) -> None:
        """By no device store, and by EBADF from one asked for before."""
        extent = self.write(store, self.random_bytes(4096, seed=7), memory)
        before = device_store(store, extent)
        store.close()
        assert store.device_store(extent) is None
        for operation in (before.write_device, before.read_device):
            with pytest.raises(StoreError) as caught:
                operation(extent, memory(4096).buffer)
            assert caught.value.errno == errno.EBADF
