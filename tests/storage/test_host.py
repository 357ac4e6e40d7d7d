"""Host memory in slabs: what is pinned stays within its bound, and is used again."""

import errno
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from ssdtrain.errors import StoreError
from ssdtrain.memory.slabs import SlabArena
from ssdtrain.storage import PAGE, HostStore
from ssdtrain.storage.bounce import page_aligned
from ssdtrain.testing.suite import SpillStoreSuite, content, filled, read_back, same

MIB = 1 << 20


class Source:
    """Stands for pinned memory; remembers the length of each slab."""

    def __init__(self):
        self.made = []

    def __call__(self, nbytes):
        self.made.append(nbytes)
        return page_aligned(nbytes)


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def make_store(source):
    """A store over slabs of 4 MiB."""
    stores = []

    def make(max_bytes=None, allocate=source):
        slabs = SlabArena(allocate, max_bytes, slab_bytes=4 * MIB)
        stores.append(HostStore(max_bytes=max_bytes, slabs=slabs))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def refused(store, nbytes):
    with pytest.raises(StoreError) as caught:
        store.allocate(nbytes)
    return caught.value


def address(store, extent):
    with store.borrow(extent, write=True) as memory:
        return memory.address


class TestOverSlabs(SpillStoreSuite):
    @pytest.fixture
    def store(self, make_store):
        return make_store()


class TestOverBoundedSlabs(SpillStoreSuite):
    @pytest.fixture
    def store(self, make_store):
        return make_store(128 * MIB)


class TestSlabs:
    def test_are_made_when_they_are_needed(self, make_store, source):
        store = make_store()
        assert source.made == []
        store.allocate(PAGE)
        assert source.made == [4 * MIB]

    def test_serve_many_blocks(self, make_store, source):
        store = make_store()
        for _ in range(4 * MIB // PAGE):
            store.allocate(PAGE)
        assert source.made == [4 * MIB]

    def test_are_used_again(self, make_store, source):
        store = make_store(16 * MIB)
        for cycle in range(50):
            extents = [store.allocate(MIB + cycle * PAGE) for _ in range(5)]
            for extent in extents:
                store.free(extent)
        assert len(source.made) <= 2

    def test_hand_a_freed_range_to_the_next_of_its_size(self, make_store):
        store = make_store()
        extents = [store.allocate(MIB) for _ in range(3)]
        freed = address(store, extents[1])
        store.free(extents[1])
        assert address(store, store.allocate(MIB)) == freed

    def test_a_larger_block_gets_one_of_its_own_rounded_up(self, make_store, source):
        store = make_store()
        store.allocate(5 * MIB)
        assert source.made == [8 * MIB]

    def test_what_a_rounded_one_has_to_spare_is_used(self, make_store, source):
        store = make_store()
        for nbytes in (5 * MIB, 3 * MIB):
            store.allocate(nbytes)
        assert source.made == [8 * MIB]

    def test_a_block_lies_in_one_also_where_the_next_follows(self, make_store):
        """Memory of two registrations is not one range, even if its addresses are."""
        whole = page_aligned(16 * MIB)
        begins = iter(range(whole.address, whole.address + 16 * MIB, 4 * MIB))

        def neighbours(nbytes):
            return type(whole)(next(begins), nbytes, whole)

        store = make_store(allocate=neighbours)
        for extent in [store.allocate(4 * MIB) for _ in range(2)]:
            store.free(extent)
        # A slab of 4 MiB is never given a range of 6 MiB; one of 8 MiB is made.
        at = address(store, store.allocate(6 * MIB))
        assert at == whole.address + 8 * MIB

    def test_are_made_once_by_threads_that_come_together(self, make_store, source):
        again = threading.Event()

        def slow(nbytes):
            if source.made:
                again.set()
            slab = source(nbytes)
            again.wait(0.1)
            return slab

        store = make_store(allocate=slow)
        start = threading.Barrier(8, timeout=30)

        def allocate(_):
            start.wait()
            return store.allocate(MIB // 2)

        with ThreadPoolExecutor(8) as pool:
            extents = list(pool.map(allocate, range(8)))
        assert source.made == [4 * MIB]
        assert len({address(store, extent) for extent in extents}) == 8

    def test_a_borrowed_range_outlives_the_store(self, make_store):
        store = make_store()
        extent = store.allocate(MIB)
        with store.borrow(extent, write=True) as memory:
            store.close()
            memory.view()[:] = filled(MIB, seed=1).view()
            assert same(content(memory), content(filled(MIB, seed=1)))

    def test_blocks_of_a_slab_do_not_overlap(self, make_store):
        store = make_store()
        sources = [filled(MIB + 100 * at, seed=at) for at in range(8)]
        extents = [store.allocate(one.nbytes) for one in sources]
        for one, extent in zip(sources, extents, strict=True):
            store.write(extent, one)
        got = [read_back(store, extent, one.nbytes) for one, extent in zip(sources, extents, strict=True)]
        assert all(same(one, content(other)) for one, other in zip(got, sources, strict=True))


class TestTheBound:
    @pytest.mark.parametrize("max_bytes", [MIB, 3 * MIB, 11 * MIB, 16 * MIB, 16 * MIB + 5000])
    def test_is_not_exceeded_by_what_is_pinned(self, make_store, source, max_bytes):
        store = make_store(max_bytes)
        with suppress(StoreError):
            for _ in range(1000):
                store.allocate(100_000)
        assert "host_memory_bytes" in str(refused(store, 100_000))
        assert sum(source.made) <= max_bytes
        assert all(nbytes.bit_count() == 1 for nbytes in source.made)

    def test_is_used_to_the_last_page(self, make_store, source):
        store = make_store(7 * MIB)
        for _ in range(7 * MIB // PAGE):
            store.allocate(PAGE)
        assert source.made == [4 * MIB, 2 * MIB, MIB]

    def test_counts_what_a_block_is_rounded_up_to(self, make_store, source):
        store = make_store(7 * MIB)
        assert refused(store, 5 * MIB).errno == errno.ENOSPC
        assert source.made == []

    def test_a_refusal_reserves_nothing(self, make_store):
        store = make_store(7 * MIB)
        refused(store, 5 * MIB)
        assert store.live_bytes == 0

    def test_below_a_page_is_room_for_nothing(self, make_store):
        assert refused(make_store(100), 1).errno == errno.ENOSPC


class TestNoMemory:
    @pytest.mark.parametrize("slabs", [True, False])
    def test_is_an_error_of_the_store(self, make_store, monkeypatch, slabs):
        def refuse(_nbytes):
            raise MemoryError("no host memory") if slabs else OSError(errno.ENOMEM, "no memory")

        monkeypatch.setattr("ssdtrain.storage.host.page_aligned", refuse)
        store = make_store(allocate=refuse) if slabs else HostStore()
        assert refused(store, MIB).errno == errno.ENOMEM
        assert store.live_bytes == 0

    def test_with_a_warning_that_is_an_error_neither_ends_anything(self, make_store):
        def warn(_nbytes):
            warnings.warn("cannot pin", RuntimeWarning, stacklevel=2)

        assert "cannot pin" in str(refused(make_store(allocate=warn), MIB))


def test_without_slabs_memory_goes_back_when_it_is_freed(monkeypatch):
    made = []
    monkeypatch.setattr(
        "ssdtrain.storage.host.page_aligned", lambda nbytes: made.append(nbytes) or page_aligned(nbytes)
    )
    store = HostStore()
    for _ in range(3):
        store.free(store.allocate(MIB))
    assert made == [MIB] * 3
