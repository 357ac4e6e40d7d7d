"""How the spill file grows and shrinks, and every way of running out of room."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ssdtrain.errors import StoreError
from ssdtrain.storage import PAGE, DirectStore, HostStore, direct, linux
from ssdtrain.testing.suite import content, filled, read_back, same

from .helpers import descriptor, free_bytes

MIB = 1 << 20


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(direct, "GROWTH_STEP", MIB)


@pytest.fixture
def store(tmp_path, small_steps):
    store = DirectStore(tmp_path)
    yield store
    store.close()


def size_on_disk(store):
    return os.fstat(descriptor(store)).st_size


def blocks_on_disk(store):
    return os.fstat(descriptor(store)).st_blocks * 512


def refused(store, nbytes):
    with pytest.raises(StoreError) as caught:
        store.allocate(nbytes)
    assert caught.value.errno == errno.ENOSPC
    assert str(nbytes) in str(caught.value)
    return str(caught.value)


class TestGrowth:
    def test_the_file_grows_in_steps(self, store):
        for _ in range(3):
            store.allocate(PAGE)
        assert size_on_disk(store) == MIB
        store.allocate(3 * MIB)
        assert size_on_disk(store) == 4 * MIB

    def test_the_default_step_is_large(self, tmp_path):
        store = DirectStore(tmp_path)
        store.allocate(1)
        assert size_on_disk(store) == 256 * MIB
        store.close()

    def test_disk_blocks_are_reserved(self, store):
        store.allocate(3 * MIB)
        assert blocks_on_disk(store) >= 3 * MIB

    def test_without_fallocate_the_file_grows_all_the_same(self, store, monkeypatch):
        monkeypatch.setattr(linux, "allocate_blocks", lambda *_args: False)
        source = filled(3 * MIB, seed=1)
        extent = store.allocate(source.nbytes)
        assert size_on_disk(store) == 3 * MIB
        store.write(extent, source)
        assert same(read_back(store, extent, source.nbytes), content(source))

    def test_a_libc_without_fallocate_is_survived(self, store, monkeypatch):
        monkeypatch.setattr(linux, "_libc", object)
        store.allocate(MIB)
        assert size_on_disk(store) == MIB

    def test_threads_grow_the_file_one_at_a_time(self, store, monkeypatch):
        real, inside, most = linux.allocate_blocks, [], []

        def watched(*args):
            inside.append(None)
            most.append(len(inside))
            try:
                return real(*args)
            finally:
                inside.pop()

        monkeypatch.setattr(linux, "allocate_blocks", watched)
        with ThreadPoolExecutor(8) as pool:
            extents = list(pool.map(store.allocate, [MIB // 2 + PAGE] * 32))
        assert max(most) == 1
        assert len({extent.offset for extent in extents}) == 32

    def test_what_finds_room_does_not_wait_for_growth(self, store, monkeypatch):
        source = filled(PAGE, seed=2)
        written = store.allocate(PAGE)
        store.write(written, source)
        growing, go = threading.Event(), threading.Event()
        real = linux.allocate_blocks

        def held(*args):
            growing.set()
            assert go.wait(30)
            return real(*args)

        monkeypatch.setattr(linux, "allocate_blocks", held)
        grower = threading.Thread(target=store.allocate, args=(8 * MIB,))
        grower.start()
        assert growing.wait(30)
        assert same(read_back(store, written, PAGE), content(source))
        store.free(store.allocate(PAGE))
        store.free(written)
        go.set()
        grower.join(30)
        assert store.live_bytes == 8 * MIB


class TestShrinking:
    @staticmethod
    def cycle(store, nbytes):
        extents = [store.allocate(nbytes // 4) for _ in range(4)]
        for extent in extents:
            store.free(extent)

    def test_the_file_keeps_its_size_while_steps_repeat(self, store):
        for _ in range(20):
            self.cycle(store, 8 * MIB)
            assert size_on_disk(store) == 8 * MIB

    def test_one_small_step_does_not_cut_the_file(self, store):
        self.cycle(store, 8 * MIB)
        self.cycle(store, MIB)
        self.cycle(store, MIB)
        assert size_on_disk(store) == 8 * MIB

    def test_many_small_steps_after_a_large_one_cut_the_file(self, store):
        self.cycle(store, 16 * MIB)
        for _ in range(direct.SHRINK_CYCLES + 1):
            self.cycle(store, MIB)
        assert size_on_disk(store) == MIB
        assert blocks_on_disk(store) <= 2 * MIB

    def test_blocks_are_right_after_the_cut(self, store):
        self.cycle(store, 16 * MIB)
        for _ in range(direct.SHRINK_CYCLES):
            self.cycle(store, MIB)
        source = filled(5 * MIB, seed=3)
        extent = store.allocate(source.nbytes)
        store.write(extent, source)
        assert same(read_back(store, extent, source.nbytes), content(source))

    def test_steps_around_a_live_block_do_not_cut_the_file(self, store):
        self.cycle(store, 16 * MIB)
        source = filled(PAGE, seed=4)
        extent = store.allocate(PAGE)
        store.write(extent, source)
        for _ in range(2 * direct.SHRINK_CYCLES):
            self.cycle(store, MIB)
        assert size_on_disk(store) == 16 * MIB
        assert same(read_back(store, extent, PAGE), content(source))

    def test_threads_that_meet_at_the_cut_all_get_room(self, store):
        self.cycle(store, 16 * MIB)
        for _ in range(direct.SHRINK_CYCLES):
            self.cycle(store, MIB)
        start = threading.Barrier(8)

        def allocate(_):
            start.wait(30)
            return store.allocate(MIB // 2)

        with ThreadPoolExecutor(8) as pool:
            extents = list(pool.map(allocate, range(8)))
        assert len({extent.offset for extent in extents}) == 8
        assert max(extent.offset + extent.length for extent in extents) <= size_on_disk(store)


@pytest.mark.parametrize("kind", ["direct", "host"])
class TestQuota:
    @pytest.fixture
    def store(self, kind, tmp_path):
        store = HostStore(max_bytes=MIB) if kind == "host" else DirectStore(tmp_path, max_bytes=MIB)
        yield store
        store.close()

    def test_it_can_be_used_to_the_last_page(self, store):
        for _ in range(MIB // PAGE):
            store.allocate(PAGE)

    def test_it_is_not_exceeded(self, store):
        store.allocate(MIB - PAGE)
        assert "max_spill_bytes" in refused(store, PAGE + 1)

    def test_what_is_freed_can_be_used_again(self, store):
        extent = store.allocate(MIB)
        refused(store, 1)
        store.free(extent)
        store.allocate(MIB)


class TestQuotaOnDisk:
    def test_the_file_itself_stays_within_it(self, tmp_path):
        store = DirectStore(tmp_path, max_bytes=MIB + 1)
        store.allocate(PAGE)
        assert size_on_disk(store) <= MIB + 1
        store.close()


class TestFreeBytesOfTheDisk:
    def test_min_free_bytes_are_left(self, tmp_path):
        store = DirectStore(tmp_path, min_free_bytes=1 << 50)
        assert "min_free_bytes" in refused(store, MIB)
        assert size_on_disk(store) == 0
        store.close()

    def test_growth_stops_at_min_free_bytes(self, small_ext4):
        store = DirectStore(small_ext4, min_free_bytes=8 * MIB)
        assert "min_free_bytes" in str(fill(store)[1])
        assert free_bytes(small_ext4) >= 8 * MIB
        assert store.live_bytes > 4 * MIB
        store.close()

    def test_a_full_disk_is_met_when_room_is_reserved(self, small_ext4):
        store = DirectStore(small_ext4)
        extents, _ = fill(store)
        assert len(extents) > 10
        sources = [filled(MIB, seed=at) for at in range(len(extents))]
        for extent, source in zip(extents, sources, strict=True):
            store.write(extent, source)
        wrong = [
            at
            for at, (extent, source) in enumerate(zip(extents, sources, strict=True))
            if not same(read_back(store, extent, MIB), content(source))
        ]
        assert wrong == []
        store.close()

    def test_room_that_is_freed_on_a_full_disk_is_used(self, small_ext4):
        store = DirectStore(small_ext4)
        extents, _ = fill(store)
        store.free(extents.pop())
        extents.append(store.allocate(MIB))
        refused(store, MIB)
        store.close()

    def test_threads_on_a_full_disk_get_room_or_an_error(self, small_ext4):
        store = DirectStore(small_ext4)

        def work(_):
            done, refusals = 0, 0
            while refusals < 3:
                try:
                    store.allocate(MIB)
                    done += 1
                except StoreError:
                    refusals += 1
            return done

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(work, range(4))) * MIB == store.live_bytes
        store.close()

    def test_a_full_disk_met_in_the_middle_of_a_write_is_reported(self, mounted, monkeypatch):
        directory = mounted("tmpfs", "-o", "size=2m")
        monkeypatch.setattr(linux, "allocate_blocks", lambda *_args: False)
        with pytest.warns(UserWarning, match="RAM"):
            store = DirectStore(directory)
        extent = store.allocate(4 * MIB)
        with pytest.raises(StoreError) as caught:
            store.write(extent, filled(4 * MIB, seed=4))
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(directory)
        store.close()

    def test_a_refused_growth_leaves_the_file_as_it_was(self, small_ext4):
        store = DirectStore(small_ext4)
        store.allocate(MIB)
        size = size_on_disk(store)
        with pytest.raises(StoreError):
            store.allocate(100 * MIB)
        assert size_on_disk(store) == size
        store.close()


def fill(store):
    """Allocate until the store refuses; the extents and the refusal."""
    extents = []
    with pytest.raises(StoreError) as caught:  # noqa: PT012 - which call refuses is not known before
        while len(extents) < 1000:
            extents.append(store.allocate(MIB))
    assert caught.value.errno == errno.ENOSPC
    return extents, caught.value
