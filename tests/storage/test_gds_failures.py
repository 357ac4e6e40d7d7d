"""What a store does when kvikio fails, and what of kvikio it must not be caught by."""

import ctypes
import errno
import gc
import os
import threading
import warnings
import weakref

import pytest

from ssdtrain.errors import StoreError
from ssdtrain.storage import DeviceBuffer, gds, kvikio_setup, linux
from ssdtrain.storage.gds import GdsStore
from ssdtrain.testing.suite import content, filled, read_back, same

from .helpers import open_descriptors, run_script

MIB = 1 << 20
DATA = bytes(range(256)) * (MIB // 256)


class Future:
    def __init__(self, get):
        self.get = get


class FakeFile:
    """What kvikio's file would be, with two methods: whatever else a store calls is an error.

    Args:
        get: What the future of a transfer does, given its arguments.
    """

    def __init__(self, get):
        self.get = get
        self.closed = 0

    def pwrite(self, *arguments):
        return Future(lambda: self.get(*arguments))

    pread = pwrite

    def close(self):
        self.closed += 1


@pytest.fixture
def put(gds_store):
    """Puts a fake in the place of kvikio's file."""

    def put(get):
        gds_store._device_file.close()
        gds_store._device_file = FakeFile(get)
        return gds_store._device_file

    return put


@pytest.fixture
def source(stand_in):
    memory = stand_in.memory(MIB)
    memory.fill(DATA)
    return memory


def write(store, memory):
    extent = store.allocate(memory.buffer.nbytes)
    store.write_device(extent, memory.buffer)
    return extent


def refused(store, memory, match=None):
    """The error of a transfer that ends the use of kvikio."""
    with (
        pytest.warns(RuntimeWarning, match="GPUDirect Storage"),
        pytest.raises(StoreError, match=match) as caught,
    ):
        store.write_device(store.allocate(memory.buffer.nbytes), memory.buffer)
    return caught.value


class TestAfterAFailure:
    def test_the_error_is_an_input_output_error_of_the_directory(self, gds_store, stand_in, source, tmp_path):
        stand_in.fail_copy()
        error = refused(gds_store, source)
        assert (error.errno, error.filename) == (errno.EIO, str(tmp_path))

    def test_one_line_says_why_and_what_is_used_instead(self, gds_store, stand_in, source, tmp_path):
        stand_in.fail_copy()
        with pytest.warns(RuntimeWarning) as caught, pytest.raises(StoreError):
            write(gds_store, source)
        (text,) = [str(warning.message) for warning in caught]
        assert str(tmp_path) in text
        assert "direct instead" in text
        assert "ILLEGAL_ADDRESS" in text
        assert "\n" not in text

    def test_there_is_no_device_store_and_the_backend_says_so(self, gds_store, stand_in, source):
        assert gds_store.backend == "gds-compat"
        stand_in.fail_copy()
        refused(gds_store, source)
        assert gds_store.device_store(gds_store.allocate(MIB)) is None
        assert gds_store.backend == "direct"

    def test_a_device_store_asked_for_before_refuses_without_another_warning(
        self, gds_store, stand_in, source
    ):
        extent = write(gds_store, source)
        before = gds_store.device_store(extent)
        stand_in.fail_copy()
        refused(gds_store, source)
        with pytest.raises(StoreError, match="no longer used"):
            before.read_device(extent, source.buffer)

    def test_the_store_goes_on_through_host_memory(self, gds_store, stand_in, source):
        extent = write(gds_store, source)
        stand_in.fail_copy()
        refused(gds_store, source)
        assert same(read_back(gds_store, extent, MIB), DATA)
        again = gds_store.allocate(MIB)
        gds_store.write(again, filled(MIB, seed=1))
        assert same(read_back(gds_store, again, MIB), content(filled(MIB, seed=1)))

    def test_a_failed_read_can_be_tried_again_through_host_memory(self, gds_store, stand_in, source):
        extent = write(gds_store, source)
        stand_in.fail_copy()
        with pytest.warns(RuntimeWarning), pytest.raises(StoreError):
            gds_store.read_device(extent, source.buffer)
        assert same(read_back(gds_store, extent, MIB), DATA)

    def test_a_failed_write_cannot_be_read(self, gds_store, stand_in, source):
        """It may have left holes, and before it, its extent held other bytes."""
        extent = write(gds_store, source)
        stand_in.fail_copy()
        with pytest.warns(RuntimeWarning), pytest.raises(StoreError):
            gds_store.write_device(extent, source.buffer)
        with pytest.raises(StoreError, match="no write there succeeded"):
            read_back(gds_store, extent, MIB)

    def test_a_part_that_fails_among_many_fails_the_transfer(self, gds_store, stand_in):
        memory = stand_in.memory(32 * MIB)
        stand_in.fail_copy(after=5)
        assert refused(gds_store, memory).errno == errno.EIO

    def test_many_threads_that_fail_at_once_warn_once(self, gds_store, put, source):
        together = threading.Barrier(4)

        def fail(*_arguments):
            together.wait(60)
            raise RuntimeError("broken")

        put(fail)
        codes = []

        def work():
            with pytest.raises(StoreError) as caught:
                write(gds_store, source)
            codes.append(caught.value.errno)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert codes == [errno.EIO] * 4
        assert len(caught) == 1

    def test_a_filter_that_makes_the_warning_an_error_does_not_hide_the_cause(
        self, gds_store, stand_in, source
    ):
        stand_in.fail_copy()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(StoreError, match="ILLEGAL_ADDRESS"):
                write(gds_store, source)


class TestByteCounts:
    @pytest.mark.parametrize("count", [0, MIB - 1, MIB + 1])
    def test_a_write_of_another_count_is_an_error(self, gds_store, put, source, count):
        put(lambda *_arguments: count)
        assert refused(gds_store, source, match=f"it moved {count}").errno == errno.EIO

    @pytest.mark.parametrize("count", [0, MIB - 1])
    def test_a_short_read_is_an_error(self, gds_store, put, source, count):
        extent = write(gds_store, source)
        put(lambda *_arguments: count)
        with pytest.warns(RuntimeWarning), pytest.raises(StoreError, match=f"it moved {count}") as caught:
            gds_store.read_device(extent, source.buffer)
        assert caught.value.errno == errno.EIO

    def test_a_file_that_lost_its_end_is_an_error(self, gds_store, source):
        extent = write(gds_store, source)
        os.truncate(gds_store._file._fd, extent.offset + MIB // 2)
        with pytest.warns(RuntimeWarning), pytest.raises(StoreError):
            gds_store.read_device(extent, source.buffer)

    def test_what_does_not_fit_is_not_begun(self, gds_store, put, source):
        file = put(pytest.fail)
        with pytest.raises(AssertionError, match="do not fit"):
            gds_store.write_device(gds_store.allocate(MIB // 2), source.buffer)
        assert file.closed == 0


class TestNoRoom:
    @pytest.fixture
    def full(self, small_ext4, untried, stand_in, monkeypatch):
        """A store on a disk of 24 MiB whose file has holes for want of preallocation."""
        monkeypatch.setattr(linux, "allocate_blocks", lambda *_arguments: False)
        store = GdsStore(small_ext4)
        store.open_device(0, compat=True)
        yield store
        store.close()

    def test_a_full_disk_is_that_and_does_not_end_the_use_of_kvikio(self, full, stand_in, source):
        full._extents.grow(64 * MIB)
        os.truncate(full._file._fd, 64 * MIB)
        large = stand_in.memory(32 * MIB)
        with pytest.raises(StoreError, match="the disk is full") as caught:
            write(full, large)
        assert caught.value.errno == errno.ENOSPC
        assert full.backend == "gds-compat"

    def test_a_preallocated_file_is_never_called_full(self, gds_store, source):
        write(gds_store, source)
        assert not gds_store._file.lacks_room(1 << 60)


class TestLifetimes:
    def test_device_memory_is_held_until_the_transfer_has_ended(self, gds_store, put, stand_in):
        memory = stand_in.memory(MIB)
        alive = weakref.ref(memory.buffer.owner)
        buffers = [memory.buffer]
        del memory
        seen = []

        def get(_view, nbytes, _position):
            gc.collect()
            seen.append(alive() is not None)
            return nbytes

        put(get)
        gds_store.write_device(gds_store.allocate(MIB), buffers.pop())
        gc.collect()
        assert seen == [True]
        assert alive() is None

    def test_close_does_not_wait_and_the_last_transfer_closes_kvikios_file(self, gds_store, put, source):
        started, ended = threading.Event(), threading.Event()

        def get(_view, nbytes, _position):
            started.set()
            ended.wait(60)
            return nbytes

        file = put(get)
        thread = threading.Thread(target=write, args=(gds_store, source))
        thread.start()
        started.wait(60)
        gds_store.close()
        closed_early = file.closed
        ended.set()
        thread.join()
        assert (closed_early, file.closed) == (0, 1)

    def test_closing_twice_closes_kvikios_file_once(self, gds_store, put):
        file = put(pytest.fail)
        gds_store.close()
        gds_store.close()
        assert file.closed == 1

    def test_no_descriptor_is_left(self, untried, stand_in, tmp_path):
        def cycle():
            store = GdsStore(tmp_path)
            store.open_device(0, compat=True)
            store.close()
            return open_descriptors()

        assert cycle() == cycle()

    def test_memory_of_the_device_is_never_registered(self, gds_store, source, monkeypatch):
        """Torch may free it, or have made it of pieces that cuFile cannot register."""
        kvikio = kvikio_setup.load()
        monkeypatch.setattr(kvikio, "memory_register", pytest.fail)
        write(gds_store, source)

    def test_memory_may_be_freed_and_its_address_used_again(self, gds_store, stand_in):
        for turn in range(20):
            memory = stand_in.memory(MIB)
            memory.fill(bytes([turn]) * MIB)
            extent = write(gds_store, memory)
            assert same(read_back(gds_store, extent, MIB), bytes([turn]) * MIB)
            gds_store.free(extent)

    def test_a_forked_child_is_refused_and_does_not_wait(self, stand_in, tmp_path):
        """The threads that kvikio would wait for are in the parent."""
        script = """
            import os, sys, warnings
            from pathlib import Path
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads is what is tested
            from tests.storage.stand_in import StandIn
            from ssdtrain.errors import StoreError
            from ssdtrain.storage import gds
            stand_in = StandIn(Path(sys.argv[1]))
            gds._probe = lambda *_, compat: "gds-compat"
            store = gds.GdsStore(sys.argv[2])
            store.open_device(0, compat=True)
            memory = stand_in.memory(1 << 20)
            extent = store.allocate(1 << 20)
            store.write_device(extent, memory.buffer)
            child = os.fork()
            if not child:
                code = 1
                try:
                    assert store.device_store(extent) is None
                    store.read_device(extent, memory.buffer)
                except StoreError:
                    code = 0
                os._exit(code)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
        text = "import os; os.environ['KVIKIO_COMPAT_MODE'] = 'ON'\n" + "\n".join(
            line[12:] for line in script.splitlines()
        )
        assert run_script(text, stand_in.directory / "libcuda.so.1", tmp_path) == "0"


class TestWhatKvikioIsGiven:
    def test_a_flat_range_of_bytes(self, source):
        from kvikio._lib.arr import asarray

        array = asarray(gds._CudaBytes(source.buffer))
        assert (array.cuda, array.c_contiguous, array.nbytes, array.shape) == (True, True, MIB, (MIB,))

    @pytest.mark.parametrize("nbytes", [(16 << 10) - 1, 16 << 10, (16 << 10) + 1])
    def test_transfers_on_both_sides_of_the_threshold_come_back(self, gds_store, stand_in, nbytes):
        memory = stand_in.memory(nbytes)
        memory.fill(DATA[:nbytes])
        extent = write(gds_store, memory)
        memory.fill(bytes(nbytes))
        gds_store.read_device(extent, memory.buffer)
        assert same(memory.content(), DATA[:nbytes])

    def test_the_calling_thread_needs_no_context(self, gds_store, stand_in, source):
        stand_in.set_current(-1)
        extent = write(gds_store, source)
        assert same(read_back(gds_store, extent, MIB), DATA)

    def test_work_that_a_stream_has_not_done_is_not_waited_for(self, gds_store, stand_in, source):
        """So the caller waits first, as the contract says."""
        cuda, stream = stand_in.cuda, ctypes.c_void_p()
        stand_in.set_current(0)
        cuda.cuStreamCreate(ctypes.byref(stream), 1)
        late = ctypes.create_string_buffer(b"\xff" * MIB, MIB)
        cuda.cuMemcpyHtoDAsync_v2(ctypes.c_uint64(source.buffer.address), late, ctypes.c_size_t(MIB), stream)
        before = write(gds_store, source)
        cuda.cuStreamSynchronize(stream)
        after = write(gds_store, source)
        cuda.cuStreamDestroy_v2(stream)
        stand_in.set_current(-1)
        assert same(read_back(gds_store, before, MIB), DATA)
        assert same(read_back(gds_store, after, MIB), b"\xff" * MIB)

    def test_an_address_that_is_no_memory_is_an_error(self, gds_store):
        with pytest.warns(RuntimeWarning), pytest.raises(StoreError):
            gds_store.write_device(gds_store.allocate(MIB), DeviceBuffer(4096, MIB, 0, None))


def test_the_stand_in_keeps_device_memory_from_the_cpu(stand_in):
    """Else the tests here would prove nothing: a store could read device memory as if it were the host's."""
    memory = stand_in.memory(4096)
    reader, writer = os.pipe()
    with pytest.raises(OSError, match="Bad address"):
        os.write(writer, (ctypes.c_char * 4096).from_address(memory.buffer.address))
    os.close(reader)
    os.close(writer)
