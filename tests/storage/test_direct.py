"""What `DirectStore` does beyond the contract: what lies in the file, without copies, at its limits."""

import ctypes
import errno
import mmap
import os
import threading

import pytest

from ssdtrain.errors import StoreError
from ssdtrain.storage import PAGE, DirectStore, HostBuffer, linux
from ssdtrain.storage.bounce import BouncePool
from ssdtrain.testing.suite import content, filled, read_back, same, skewed_buffer

from .helpers import descriptor, look_under, run_script

MIB = 1 << 20


@pytest.fixture(params=["direct", "buffered"])
def store(request, tmp_path):
    """A store of each kind."""
    store = DirectStore(tmp_path, direct=request.param == "direct")
    yield store
    store.close()


@pytest.fixture
def direct_store(tmp_path):
    store = DirectStore(tmp_path, direct=True)
    yield store
    store.close()


@pytest.fixture
def buffered_store(tmp_path):
    store = DirectStore(tmp_path, direct=False)
    yield store
    store.close()


def stored(store, source):
    extent = store.allocate(source.nbytes)
    store.write(extent, source)
    return extent


class TestWhatLiesInTheFile:
    @pytest.mark.parametrize("nbytes", [1, 511, 513, 4095, 4097, 65535])
    def test_a_small_block_is_all_on_disk(self, store, nbytes):
        source = filled(nbytes, seed=nbytes)
        extent = stored(store, source)
        with look_under(store) as fd:
            assert same(os.pread(fd, nbytes, extent.offset), content(source))

    def test_a_large_block_is_on_disk_but_for_its_edges(self, direct_store):
        source = filled(MIB + 100, seed=1, skew=64)
        extent = stored(direct_store, source)
        head, tail = PAGE - 64, (64 + MIB + 100) % PAGE
        with look_under(direct_store) as fd:
            middle = os.pread(fd, source.nbytes - head - tail, extent.offset)
        assert same(middle, content(source)[head : source.nbytes - tail])
        assert (len(extent.edges[0].head), len(extent.edges[0].tail)) == (head, tail)

    def test_an_aligned_block_is_all_on_disk(self, direct_store):
        source = filled(MIB, seed=2, skew=0)
        extent = stored(direct_store, source)
        with look_under(direct_store) as fd:
            assert same(os.pread(fd, MIB, extent.offset), content(source))

    def test_a_buffered_block_is_all_on_disk(self, buffered_store):
        source = filled(MIB + 100, seed=3)
        extent = stored(buffered_store, source)
        with look_under(buffered_store) as fd:
            assert same(os.pread(fd, source.nbytes, extent.offset), content(source))

    def test_padding_is_zero_and_not_another_block(self, direct_store):
        stored(direct_store, filled(PAGE - 1, seed=4))
        extent = stored(direct_store, filled(10, seed=5))
        with look_under(direct_store) as fd:
            assert same(os.pread(fd, PAGE - 10, extent.offset + 10), bytes(PAGE - 10))

    def test_edges_in_memory_stay_below_two_pages(self, direct_store):
        for skew in (1, 64, 4095):
            extent = stored(direct_store, filled(65536 + 4095, seed=6, skew=skew))
            assert sum(len(part) for part in extent.edges[0][1:]) < 2 * PAGE

    def test_bytes_changed_on_disk_are_what_is_read(self, direct_store):
        source = filled(MIB, seed=7)
        extent = stored(direct_store, source)
        with look_under(direct_store) as fd:
            os.pwrite(fd, b"changed!", extent.offset + PAGE)
            os.fsync(fd)
        at = PAGE - 64 + PAGE
        assert read_back(direct_store, extent, MIB)[at : at + 8] == b"changed!"


class TestWithoutCopies:
    @pytest.fixture
    def no_bounce(self, monkeypatch):
        def refuse(_pool):
            raise AssertionError("bounced")

        monkeypatch.setattr(BouncePool, "lend", refuse)

    @pytest.mark.usefixtures("no_bounce")
    @pytest.mark.parametrize("nbytes", [65536, MIB, MIB + 100])
    @pytest.mark.parametrize("skew", [0, 64, 511])
    def test_the_same_skew_needs_no_bounce_buffer(self, direct_store, nbytes, skew):
        source = filled(nbytes, seed=8, skew=skew)
        extent = stored(direct_store, source)
        assert same(read_back(direct_store, extent, nbytes, skew=skew), content(source))

    @pytest.mark.usefixtures("no_bounce")
    def test_a_small_aligned_block_needs_no_bounce_buffer(self, direct_store):
        source = filled(2 * PAGE, seed=9, skew=0)
        extent = stored(direct_store, source)
        assert same(read_back(direct_store, extent, 2 * PAGE, skew=0), content(source))

    def test_a_large_block_is_one_system_call(self, direct_store, monkeypatch):
        calls = count_calls(monkeypatch, "pwrite", "preadv")
        extent = stored(direct_store, skewed_buffer(32 * MIB))
        read_back(direct_store, extent, 32 * MIB)
        assert calls == ["pwrite", "preadv"]

    def test_bounce_buffers_are_reused(self, direct_store, monkeypatch):
        made = []
        real = mmap.mmap
        monkeypatch.setattr(mmap, "mmap", lambda *args, **kwargs: made.append(args) or real(*args, **kwargs))
        for seed in range(20):
            stored(direct_store, filled(513, seed=seed))
        assert len(made) == 1

    def test_idle_bounce_buffers_are_few(self):
        pool = BouncePool(nbytes=PAGE, keep=2)
        with pool.lend() as one, pool.lend() as two, pool.lend() as three:
            assert len({one.address, two.address, three.address}) == 3
        assert len(pool._idle) == 2


def count_calls(monkeypatch, *names):
    calls = []

    def counting(name, real):
        def call(*args):
            calls.append(name)
            return real(*args)

        return call

    for name in names:
        monkeypatch.setattr(os, name, counting(name, getattr(os, name)))
    return calls


class TestPageCache:
    @staticmethod
    def resident(store, extent):
        """How many of the extent's pages are in the page cache."""
        pages = extent.length // PAGE
        with look_under(store) as fd, mmap.mmap(fd, extent.length, offset=extent.offset) as mapping:
            answer = (ctypes.c_ubyte * pages)()
            first = ctypes.c_char.from_buffer(mapping)
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.mincore(ctypes.byref(first), ctypes.c_size_t(extent.length), answer) == 0
            del first
            return sum(value & 1 for value in answer)

    def test_nothing_stays_after_a_write(self, store):
        extent = stored(store, filled(4 * MIB + 100, seed=10))
        assert self.resident(store, extent) == 0

    def test_nothing_stays_after_a_read(self, store):
        extent = stored(store, filled(4 * MIB + 100, seed=11))
        read_back(store, extent, extent.nbytes)
        assert self.resident(store, extent) == 0

    def test_a_kernel_without_sync_file_range_drops_too(self, buffered_store, monkeypatch):
        class Bare:
            """A libc that has nothing of what is optional."""

        synced = count_calls(monkeypatch, "fdatasync")
        monkeypatch.setattr(linux, "_libc", Bare)
        extent = stored(buffered_store, filled(MIB, seed=12))
        monkeypatch.undo()
        assert synced == ["fdatasync"]
        assert self.resident(buffered_store, extent) == 0


class TestShortTransfers:
    @pytest.mark.parametrize("most", [PAGE, 3 * PAGE, 10_000, 100_001])
    def test_short_writes_are_continued(self, store, monkeypatch, most):
        real = os.pwrite

        def short(fd, view, offset):
            # What is written is aligned; what is reported may end inside a page.
            written = real(fd, view[: -(-most // PAGE) * PAGE], offset)
            return min(most, written)

        monkeypatch.setattr(os, "pwrite", short)
        source = filled(MIB + 100, seed=13)
        extent = stored(store, source)
        assert same(read_back(store, extent, source.nbytes), content(source))

    @pytest.mark.parametrize("most", [PAGE, 3 * PAGE, 10_000, 100_001])
    def test_short_reads_are_continued(self, store, monkeypatch, most):
        real = os.preadv

        def short(fd, views, offset):
            return min(most, real(fd, [views[0][: -(-most // PAGE) * PAGE]], offset))

        source = filled(MIB + 100, seed=14)
        extent = stored(store, source)
        monkeypatch.setattr(os, "preadv", short)
        assert same(read_back(store, extent, source.nbytes), content(source))

    def test_a_write_that_makes_no_progress_ends_in_an_error(self, store, monkeypatch):
        extent = store.allocate(MIB)
        monkeypatch.setattr(os, "pwrite", lambda *_args: 0)
        with pytest.raises(StoreError, match="short write") as caught:
            store.write(extent, filled(MIB, seed=15))
        assert caught.value.errno == errno.EIO

    def test_a_file_that_ends_early_is_an_error(self, store):
        extent = stored(store, filled(MIB, seed=16))
        os.ftruncate(descriptor(store), extent.offset + MIB // 2)
        with pytest.raises(StoreError, match="it ends after") as caught:
            read_back(store, extent, MIB)
        assert caught.value.errno == errno.EIO

    @pytest.mark.parametrize("kind", ["direct", "buffered"])
    def test_a_file_size_limit_met_in_the_middle_is_reported(self, tmp_path, kind):
        script = """
import ctypes, errno, resource, sys
from ssdtrain.errors import StoreError
from ssdtrain.storage import DirectStore
from ssdtrain.testing.suite import filled
store = DirectStore(sys.argv[1], direct=sys.argv[2] == "direct")
extent = store.allocate(16384)
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
try:
    store.write(extent, filled(16384, seed=1, skew=0))
except StoreError as error:
    print(errno.errorcode[error.errno], error.filename == sys.argv[1], "16384" in str(error))
"""
        assert run_script(script, tmp_path, kind) == "EFBIG True True"

    def test_a_file_size_limit_met_by_growth_is_reported(self, tmp_path):
        script = """
import errno, resource, sys
from ssdtrain.errors import StoreError
from ssdtrain.storage import DirectStore
store = DirectStore(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
print(store.allocate(8192).length)
try:
    store.allocate(16384)
except StoreError as error:
    print(errno.errorcode[error.errno])
"""
        assert run_script(script, tmp_path) == "8192\nEFBIG"


class TestErrors:
    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
    def test_a_failed_write_keeps_number_place_and_range(self, store, tmp_path, monkeypatch, code):
        store.allocate(PAGE)
        extent = store.allocate(MIB)
        fail(monkeypatch, "pwrite", code)
        with pytest.raises(StoreError) as caught:
            store.write(extent, filled(MIB, seed=17, skew=0))
        assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path))
        assert f"cannot write {MIB} bytes at offset {PAGE} of the spill file: {os.strerror(code)}" in str(
            caught.value
        )

    def test_a_failed_read_keeps_number_place_and_range(self, store, tmp_path, monkeypatch):
        extent = stored(store, filled(MIB, seed=18, skew=0))
        fail(monkeypatch, "preadv", errno.EIO)
        with pytest.raises(StoreError) as caught:
            read_back(store, extent, MIB, skew=0)
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path))
        assert f"cannot read {MIB} bytes at offset 0 of the spill file" in str(caught.value)

    def test_a_failed_write_cannot_be_read(self, store, monkeypatch):
        extent = stored(store, filled(MIB, seed=19))
        with monkeypatch.context() as patch:
            fail(patch, "pwrite", errno.EIO)
            with pytest.raises(StoreError):
                store.write(extent, filled(MIB, seed=20))
        with pytest.raises(StoreError, match="no write there succeeded"):
            read_back(store, extent, MIB)

    def test_a_store_works_on_after_a_failure(self, store, monkeypatch):
        extent = store.allocate(MIB)
        with monkeypatch.context() as patch:
            fail(patch, "pwrite", errno.EIO)
            with pytest.raises(StoreError):
                store.write(extent, filled(MIB, seed=21))
        store.free(extent)
        source = filled(MIB, seed=22)
        assert same(read_back(store, stored(store, source), MIB), content(source))

    def test_a_flush_that_fails_is_a_failed_write(self, buffered_store, monkeypatch):
        def refuse(*_args):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(linux, "flush_range", refuse)
        with pytest.raises(StoreError):
            stored(buffered_store, filled(MIB, seed=23))

    def test_descriptions_name_directory_offset_and_length(self, store, tmp_path):
        store.allocate(PAGE)
        extent = store.allocate(12345)
        where = f"spill file in {tmp_path} ({store.backend}), offset {PAGE}, 12345 bytes"
        assert store.describe(extent) == where


def fail(monkeypatch, name, code):
    def failing(*_args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, failing)


class TestClosing:
    def test_an_error_on_close_is_reported_once(self, tmp_path, monkeypatch):
        store = DirectStore(tmp_path)
        with monkeypatch.context() as patch:
            real = os.close

            def failing(fd):
                real(fd)
                raise OSError(errno.EIO, "Input/output error")

            patch.setattr(os, "close", failing)
            with pytest.raises(StoreError) as caught:
                store.close()
        assert caught.value.errno == errno.EIO
        store.close()

    @pytest.mark.parametrize("operation", ["write", "read"])
    def test_a_closed_store_leaves_the_next_owner_of_its_descriptor_alone(self, tmp_path, operation):
        store = DirectStore(tmp_path)
        extent = stored(store, filled(MIB, seed=24))
        number = descriptor(store)
        store.close()
        other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
        if other != number:
            os.dup2(other, number)
        os.pwrite(number, b"precious", 0)
        with pytest.raises(StoreError):
            getattr(store, operation)(extent, filled(MIB, seed=25))
        store.close()
        assert os.pread(number, 8, 0) == b"precious"
        for fd in {other, number}:
            os.close(fd)

    def test_close_waits_for_nobody_and_the_last_one_out_closes(self, tmp_path, monkeypatch):
        store = DirectStore(tmp_path)
        extent = store.allocate(MIB)
        number = descriptor(store)
        inside, go = threading.Event(), threading.Event()
        real = os.pwrite

        def held(fd, view, offset):
            inside.set()
            assert go.wait(30)
            return real(fd, view, offset)

        monkeypatch.setattr(os, "pwrite", held)
        writer = threading.Thread(target=store.write, args=(extent, filled(MIB, seed=26)))
        writer.start()
        assert inside.wait(30)
        store.close()
        os.fstat(number)
        go.set()
        writer.join(30)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


def test_a_buffer_reaches_its_own_bytes_only():
    buffer = HostBuffer(skewed_buffer(100).address, 100, None)
    assert len(buffer.view(10, 20)) == 10
    with pytest.raises(AssertionError):
        buffer.view(0, 101)
