"""The stores that tests are written with have to be right themselves."""

import errno
import subprocess
import sys
import threading
import time

import pytest

from ssdtrain.errors import StoreError
from ssdtrain.storage import HostStore
from ssdtrain.testing import (
    Fault,
    FaultyStore,
    GatedStore,
    InjectedDeathError,
    NullStore,
    RecordingStore,
    ReorderingStore,
    SlowStore,
)
from ssdtrain.testing.suite import content, filled, read_back, same, skewed_buffer

MIB = 1 << 20


def stored(store, source):
    extent = store.allocate(source.nbytes)
    store.write(extent, source)
    return extent


def in_thread(function, *arguments):
    """A started thread; `outcome` holds the exception, if one came."""
    outcome = []

    def run():
        try:
            function(*arguments)
        except StoreError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.outcome = outcome
    thread.start()
    return thread


class TestSlowStore:
    def test_latency_is_taken(self):
        store = SlowStore(HostStore(), latency=0.05)
        began = time.monotonic()
        stored(store, filled(1, seed=1))
        assert time.monotonic() - began >= 0.05

    def test_bandwidth_is_shared_by_threads(self):
        store = SlowStore(HostStore(), bandwidth=20 * MIB)
        extents = [store.allocate(MIB) for _ in range(2)]
        began = time.monotonic()
        threads = [in_thread(store.write, extent, filled(MIB, seed=2)) for extent in extents]
        for thread in threads:
            thread.join(30)
        assert time.monotonic() - began >= 0.1


class TestReorderingStore:
    @pytest.mark.parametrize("kind", ["write", "read"])
    def test_a_later_operation_ends_first(self, kind):
        recording = RecordingStore(HostStore())
        first, second = (stored(recording, filled(MIB, seed=seed)) for seed in (1, 2))
        begun = threading.Event()

        class Patient(ReorderingStore):
            """The first to come waits for the second, and the second for nobody."""

            def _let_pass(self):
                if begun.is_set():
                    return
                begun.set()
                super()._let_pass()

        store = Patient(recording, probability=1.0, patience=30)
        done = len(recording.operations)
        waiting = in_thread(getattr(store, kind), first, filled(MIB, seed=3))
        assert begun.wait(30)
        getattr(store, kind)(second, filled(MIB, seed=4))
        waiting.join(30)
        assert [operation.extent for operation in recording.operations[done:]] == [second, first]

    def test_without_another_it_goes_on(self):
        store = ReorderingStore(HostStore(), probability=1.0, patience=0.001)
        source = filled(MIB, seed=1)
        assert same(read_back(store, stored(store, source), MIB), content(source))


class TestGatedStore:
    @pytest.fixture
    def store(self):
        store = GatedStore(HostStore(), timeout=30)
        yield store
        store.close()

    def test_a_write_waits_until_it_is_released(self, store):
        extent = store.allocate(MIB)
        writer = in_thread(store.write, extent, filled(MIB, seed=3))
        store.wait_for("write")
        with pytest.raises(StoreError):
            store.inner.read(extent, skewed_buffer(MIB))
        store.release("write")
        writer.join(30)
        store.inner.read(extent, skewed_buffer(MIB))

    def test_as_many_pass_as_are_released(self, store):
        extents = [store.allocate(1) for _ in range(3)]
        writers = [in_thread(store.write, extent, filled(1, seed=4)) for extent in extents]
        store.wait_for("write", 3)
        store.release("write", 2)
        while sum(not writer.is_alive() for writer in writers) < 2:
            threading.Event().wait(0.001)
        assert sum(writer.is_alive() for writer in writers) == 1
        store.open("write")
        for writer in writers:
            writer.join(30)

    def test_reads_and_writes_have_gates_of_their_own(self, store):
        store.open("write")
        source = filled(MIB, seed=5)
        extent = stored(store, source)
        destination = skewed_buffer(MIB)
        reader = in_thread(store.read, extent, destination)
        store.wait_for("read")
        store.open("read")
        reader.join(30)
        assert same(content(destination), content(source))

    def test_a_gate_can_be_closed_again(self, store):
        store.open("write")
        extent = stored(store, filled(1, seed=6))
        store.hold("write")
        writer = in_thread(store.write, extent, filled(1, seed=7))
        store.wait_for("write")
        assert writer.is_alive()
        store.open("write")
        writer.join(30)

    def test_closing_leaves_nobody_waiting(self, store):
        writer = in_thread(store.write, store.allocate(1), filled(1, seed=8))
        store.wait_for("write")
        store.close()
        writer.join(30)
        assert writer.outcome[0].errno == errno.EBADF

    def test_a_forgotten_gate_ends_in_an_error(self):
        store = GatedStore(HostStore(), timeout=0.01)
        with pytest.raises(StoreError) as caught:
            stored(store, filled(1, seed=9))
        assert caught.value.errno == errno.ETIMEDOUT
        with pytest.raises(TimeoutError):
            store.wait_for("read")


class TestFaultyStore:
    @pytest.mark.parametrize("operation", ["allocate", "write", "read"])
    def test_the_chosen_operation_fails_with_the_chosen_error(self, operation):
        store = FaultyStore(HostStore(), Fault(operation=operation, errno=errno.ENOSPC))
        with pytest.raises(StoreError, match="injected") as caught:
            read_back(store, stored(store, filled(10, seed=10)), 10)
        assert caught.value.errno == errno.ENOSPC
        assert store.injected == 1

    def test_only_the_chosen_index_fails(self):
        store = FaultyStore(HostStore(), Fault(operation="allocate", index=1))
        store.allocate(1)
        with pytest.raises(StoreError):
            store.allocate(1)
        store.allocate(1)

    def test_a_predicate_chooses(self):
        store = FaultyStore(
            HostStore(), Fault(operation="allocate", when=lambda _extent, nbytes: nbytes > 10)
        )
        store.allocate(10)
        with pytest.raises(StoreError):
            store.allocate(11)

    def test_chance_is_repeatable(self):
        def outcomes(seed):
            store = FaultyStore(HostStore(), Fault(operation="allocate", probability=0.5), seed=seed)
            return [survives(store.allocate, 1) for _ in range(64)]

        assert outcomes(1) == outcomes(1) != outcomes(2)
        assert 10 < sum(outcomes(1)) < 54

    def test_a_short_read_fills_half(self):
        store = FaultyStore(HostStore(), Fault(operation="read", effect="short"))
        source = filled(1000, seed=11)
        extent = stored(store, source)
        destination = skewed_buffer(1000, fill=0xEE)
        with pytest.raises(StoreError):
            store.read(extent, destination)
        assert content(destination) == content(source)[:500] + b"\xee" * 500

    def test_a_short_write_is_an_error(self):
        store = FaultyStore(HostStore(), Fault(operation="write", effect="short"))
        with pytest.raises(StoreError):
            stored(store, filled(1000, seed=12))

    @pytest.mark.parametrize("operation", ["allocate", "write", "read"])
    def test_a_death_is_no_error_that_anybody_catches(self, operation):
        store = FaultyStore(HostStore())
        extent = stored(store, filled(MIB, seed=1))
        store.faults = (Fault(operation=operation, effect="die"),)
        calls = {
            "allocate": lambda: store.allocate(MIB),
            "write": lambda: store.write(extent, filled(MIB, seed=2)),
            "read": lambda: store.read(extent, skewed_buffer(MIB)),
        }
        with pytest.raises(InjectedDeathError, match=f"{operation} of {MIB} bytes") as caught:
            calls[operation]()
        assert not isinstance(caught.value, Exception)

    @pytest.mark.parametrize("operation", ["write", "read"])
    def test_a_flip_changes_one_bit_in_silence(self, operation):
        store = FaultyStore(HostStore(), Fault(operation=operation, effect="flip", index=0))
        source = filled(1000, seed=13)
        before = content(source)
        got = read_back(store, stored(store, source), 1000)
        assert content(source) == before
        assert sum((one ^ other).bit_count() for one, other in zip(got, before, strict=True)) == 1


def survives(function, *arguments):
    try:
        function(*arguments)
    except StoreError:
        return False
    return True


class TestRecordingStore:
    def test_calls_are_remembered_in_order(self):
        store = RecordingStore(HostStore())
        extent = stored(store, filled(100, seed=14))
        read_back(store, extent, 100)
        store.free(extent)
        assert [(op.kind, op.nbytes, op.extent is extent) for op in store.operations] == [
            ("allocate", 100, True),
            ("write", 100, True),
            ("read", 100, True),
            ("free", 100, True),
        ]
        assert len(store.of_kind("write")) == 1

    def test_what_failed_is_not_remembered(self):
        store = RecordingStore(FaultyStore(HostStore(), Fault(operation="allocate")))
        assert not survives(store.allocate, 1)
        assert store.operations == []


class TestNullStore:
    def test_it_accounts_and_moves_nothing(self):
        store = NullStore()
        extent = stored(store, filled(MIB, seed=15))
        destination = skewed_buffer(MIB, fill=0xEE)
        store.read(extent, destination)
        assert same(content(destination), b"\xee" * MIB)
        assert (store.bytes_written, store.bytes_read, store.live_bytes) == (MIB, MIB, MIB)
        store.free(extent)
        assert store.live_bytes == 0

    def test_it_can_be_closed(self):
        store = NullStore()
        store.close()
        with pytest.raises(StoreError):
            store.allocate(1)


def test_the_stores_need_no_pytest():
    script = "import sys; sys.modules['pytest'] = None; import ssdtrain.testing"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
