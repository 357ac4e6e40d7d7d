"""Host memory before a disk: what moves on, when, and that nothing is lost on the way."""

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ssdtrain.errors import SSDTrainError, StoreError
from ssdtrain.memory.slabs import SlabArena
from ssdtrain.storage import PAGE, DeviceBuffer, DeviceStore, DirectStore, HostBuffer, HostStore, TieredStore
from ssdtrain.storage.bounce import page_aligned
from ssdtrain.testing import (
    Fault,
    FaultyStore,
    GatedStore,
    OffloadOver,
    RecordingStore,
    ReorderingStore,
    SlowStore,
    WrapperStore,
)
from ssdtrain.testing.suite import SpillStoreSuite, content, filled, read_back, same, skewed_buffer

MIB = 1 << 20
BUDGET = 8 * MIB


def eventually(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def settle(store):
    """Return when the thread has nothing to do, which is when it waits for a change and nobody has told it of one."""

    def waits():
        with store._changed:
            return bool(store._changed._waiters)

    eventually(waits)


def on_the_thread(_extent, _nbytes):
    return threading.current_thread().name == "ssdtrain-tier"


@pytest.fixture
def tier():
    """Makes tiers with a budget of 8 MiB over a store; opens its gates in the end, and closes it."""
    made = []

    def make(below=None, max_bytes=BUDGET, slabs=None):
        below = HostStore() if below is None else below
        made.append((TieredStore(HostStore(max_bytes=max_bytes, slabs=slabs), below), below))
        return made[-1][0]

    yield make
    for store, below in made:
        if isinstance(below, GatedStore):
            below.open("write")
        store.close()


class Conformance(SpillStoreSuite):
    """With a budget that some tests stay within, and that others exceed by far."""

    __test__ = False

    def below(self, directory):
        return DirectStore(directory)

    @pytest.fixture
    def store(self, tier, tmp_path):
        return tier(self.below(tmp_path))


class TestOverDirect(Conformance):
    __test__ = True


class TestOverBuffered(Conformance):
    __test__ = True

    def below(self, directory):
        return DirectStore(directory, direct=False)


class TestFromSlabs(Conformance):
    __test__ = True

    @pytest.fixture
    def store(self, tier, tmp_path):
        slabs = SlabArena(page_aligned, BUDGET, slab_bytes=2 * MIB)
        return tier(DirectStore(tmp_path), slabs=slabs)


class TestEverythingMovesAtOnce(Conformance):
    __test__ = True

    @pytest.fixture
    def store(self, tier, tmp_path, monkeypatch):
        monkeypatch.setattr("ssdtrain.storage.pieces.PIECE_BYTES", 64 << 10)
        store = tier(DirectStore(tmp_path), max_bytes=1 << 30)
        store._enough = 0
        return store


class TestOverSlowAndOutOfOrder(Conformance):
    __test__ = True

    def below(self, directory):
        return SlowStore(ReorderingStore(HostStore()), latency=0.0005)


class TestEveryMoveFails(Conformance):
    __test__ = True

    def below(self, directory):
        return FaultyStore(HostStore(), Fault(operation="write", when=on_the_thread))


class TestNoRoomAtAll(Conformance):
    __test__ = True

    @pytest.fixture
    def store(self, tier, tmp_path):
        return tier(DirectStore(tmp_path), max_bytes=1)


class Block:
    """One that was written. Its length, one page less than that of the block before it, says which one it is."""

    def __init__(self, store, index):
        self.source = filled(MIB - index * PAGE, seed=index)
        self.extent = store.allocate(self.source.nbytes)
        store.write(self.extent, self.source)

    @property
    def nbytes(self):
        return self.source.nbytes

    def is_right(self, store):
        return same(read_back(store, self.extent, self.nbytes), content(self.source))


def blocks_of(store, *indices):
    return [Block(store, index) for index in indices]


def is_below(store, block):
    with store.borrow(block.extent, write=False) as memory:
        return memory is None


@pytest.fixture
def recording():
    return RecordingStore(HostStore())


@pytest.fixture
def gated(recording):
    """Its writes wait; `gated.inner` remembers those that passed."""
    return GatedStore(recording, hold=("write",), timeout=30)


def lengths_below(recording):
    return [operation.nbytes for operation in recording.of_kind("write")]


class TestWhatMoves:
    def test_up_to_half_of_the_budget_stays(self, tier, recording):
        store = tier(recording)
        blocks_of(store, 0, 1, 2, 3)
        settle(store)
        assert recording.operations == []

    def test_above_half_the_oldest_go(self, tier, recording):
        store = tier(recording)
        blocks = blocks_of(store, 0, 1, 2, 3, 4, 5)
        settle(store)
        assert lengths_below(recording) == [block.nbytes for block in blocks[:2]]
        assert [is_below(store, block) for block in blocks] == [True, True, False, False, False, False]

    def test_blocks_come_back_wherever_they_are(self, tier, recording):
        store = tier(recording)
        blocks = blocks_of(store, *range(30))
        settle(store)
        assert all(block.is_right(store) for block in blocks)

    def test_what_is_freed_in_time_is_never_written_below(self, tier, gated):
        store = tier(gated)
        blocks = blocks_of(store, 0, 1, 2, 3, 4)
        gated.wait_for("write")
        blocks += blocks_of(store, 5, 6)
        store.free(blocks[1].extent)
        gated.open("write")
        settle(store)
        assert lengths_below(gated.inner) == [blocks[0].nbytes, blocks[2].nbytes]

    def test_what_is_not_whole_stays(self, tier, recording):
        store = tier(recording)
        extent = store.allocate(2 * MIB)
        first, second = filled(MIB, seed=1), filled(MIB, seed=2)
        store.write(extent, first)
        blocks = blocks_of(store, 0, 1, 2)
        settle(store)
        assert lengths_below(recording) == [blocks[0].nbytes]
        store.write(extent, second, MIB)
        assert same(read_back(store, extent, MIB, offset=MIB), content(second))

    def test_what_is_borrowed_stays(self, tier, recording):
        store = tier(recording)
        blocks = blocks_of(store, 0, 1)
        with store.borrow(blocks[0].extent, write=False) as memory:
            blocks += blocks_of(store, 2, 3, 4)
            settle(store)
            assert lengths_below(recording) == [blocks[1].nbytes]
            assert same(content(memory), content(blocks[0].source))

    def test_what_was_borrowed_moves_when_it_is_given_back(self, tier, recording):
        store = tier(recording)
        extent = store.allocate(5 * MIB)
        with store.borrow(extent, write=True) as memory:
            memory.view()[:] = filled(5 * MIB, seed=1).view()
            settle(store)
            assert recording.operations == []
        settle(store)
        assert sum(lengths_below(recording)) == 5 * MIB
        assert store._host.live_bytes == 0


class TestNothingWaits:
    def test_a_block_without_room_goes_below_by_itself(self, tier, gated):
        store = tier(gated)
        blocks_of(store, *range(8))
        gated.wait_for("write")
        extent = store.allocate(MIB)
        assert store.live_bytes - store._host.live_bytes == MIB
        gated.open("write")
        source = filled(MIB, seed=9)
        store.write(extent, source)
        assert same(read_back(store, extent, MIB), content(source))

    def test_a_block_larger_than_the_budget_goes_below(self, tier, recording):
        store = tier(recording)
        source = filled(BUDGET + 1, seed=1)
        extent = store.allocate(source.nbytes)
        store.write(extent, source)
        assert lengths_below(recording) == [source.nbytes]
        assert same(read_back(store, extent, source.nbytes), content(source))


class TestWhileABlockMoves:
    @pytest.fixture
    def store(self, tier, gated):
        return tier(gated)

    @pytest.fixture
    def blocks(self, store, gated):
        """The first of which is about to be written below."""
        blocks = blocks_of(store, 0, 1, 2, 3, 4)
        gated.wait_for("write")
        return blocks

    def test_it_can_be_read(self, store, blocks):
        assert blocks[0].is_right(store)

    def test_it_can_be_borrowed_until_after_it_has_moved(self, store, gated, blocks):
        with store.borrow(blocks[0].extent, write=False) as memory:
            gated.open("write")
            eventually(lambda: is_below(store, blocks[0]))
            blocks_of(store, 5)
            assert same(content(memory), content(blocks[0].source))
            before = store._host.live_bytes
        assert store._host.live_bytes == before - blocks[0].extent.length
        assert blocks[0].is_right(store)

    def test_freeing_it_gives_back_both(self, store, gated, blocks):
        before = store.live_bytes
        store.free(blocks[0].extent)
        assert store.live_bytes == before - blocks[0].extent.length
        gated.open("write")
        settle(store)
        assert gated.live_bytes == 0
        assert store._host.live_bytes == sum(block.extent.length for block in blocks[1:])

    def test_freeing_it_ends_the_move_early(self, tier, gated, monkeypatch):
        monkeypatch.setattr("ssdtrain.storage.pieces.PIECE_BYTES", MIB)
        store = tier(gated)
        extent = store.allocate(5 * MIB)
        store.write(extent, filled(5 * MIB, seed=1))
        gated.wait_for("write")
        store.free(extent)
        gated.open("write")
        settle(store)
        assert lengths_below(gated.inner) == [MIB]

    def test_writing_it_makes_the_move_void(self, store, gated, blocks):
        other = filled(blocks[0].nbytes, seed=99)
        store.write(blocks[0].extent, other)
        gated.open("write")
        settle(store)
        assert same(read_back(store, blocks[0].extent, other.nbytes), content(other))

    def test_what_was_written_again_is_the_newest(self, store, gated, blocks):
        store.write(blocks[0].extent, blocks[0].source)
        gated.open("write")
        settle(store)
        assert [is_below(store, block) for block in blocks] == [False, True, False, False, False]
        assert gated.live_bytes == blocks[1].extent.length

    def test_closing_waits_for_the_write(self, store, gated, blocks):
        with ThreadPoolExecutor(1) as pool:
            closed = pool.submit(store.close)
            eventually(lambda: store._closed)
            assert not closed.done()
            gated.release("write")
            closed.result(30)
        assert not store._thread.is_alive()
        assert len(lengths_below(gated.inner)) == 1

    def test_freeing_after_closing_does_nothing(self, store, gated, blocks):
        gated.open("write")
        store.close()
        for block in blocks:
            store.free(block.extent)


class TestAMoveThatFails:
    @pytest.fixture
    def faulty(self):
        return FaultyStore(HostStore())

    @pytest.mark.parametrize("operation", ["allocate", "write"])
    def test_leaves_the_block_where_it_was(self, tier, faulty, operation):
        faulty.faults = (Fault(operation=operation, errno=errno.ENOSPC),)
        store = tier(faulty)
        blocks = blocks_of(store, 0, 1, 2, 3, 4)
        settle(store)
        assert not any(is_below(store, block) for block in blocks)
        assert all(block.is_right(store) for block in blocks)
        assert faulty.live_bytes == 0
        assert store.failed_moves == 1

    def test_in_the_middle_leaves_it_too(self, tier, faulty, monkeypatch):
        monkeypatch.setattr("ssdtrain.storage.pieces.PIECE_BYTES", 64 << 10)
        faulty.faults = (Fault(operation="write", index=3, effect="short"),)
        store = tier(faulty)
        blocks = blocks_of(store, 0, 1, 2, 3, 4)
        settle(store)
        assert all(block.is_right(store) for block in blocks)
        assert faulty.live_bytes == 0

    def test_is_tried_once_for_each_block_that_comes(self, tier, faulty):
        faulty.faults = (Fault(operation="write"),)
        store = tier(faulty)
        blocks_of(store, 0, 1, 2, 3, 4)
        settle(store)
        assert faulty.injected == 1
        blocks_of(store, 5)
        settle(store)
        assert faulty.injected == 2

    def test_is_made_up_for_by_others(self, tier, faulty):
        faulty.faults = (Fault(operation="write", index=0),)
        store = tier(faulty)
        blocks = blocks_of(store, 0, 1, 2, 3, 4)
        settle(store)
        blocks += blocks_of(store, 5)
        settle(store)
        assert [is_below(store, block) for block in blocks] == [False, True, True, False, False, False]

    def test_gives_a_block_back_that_was_freed_meanwhile(self, tier, faulty):
        gated = GatedStore(faulty, hold=("write",), timeout=30)
        store = tier(gated)
        blocks = blocks_of(store, 0, 1, 2, 3, 4)
        gated.wait_for("write")
        faulty.faults = (Fault(operation="write"),)
        store.free(blocks[0].extent)
        gated.open("write")
        settle(store)
        assert faulty.live_bytes == 0
        assert store._host.live_bytes == store.live_bytes

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_by_a_bug_that_ends_the_thread_loses_nothing(self, tier, faulty):
        faulty.faults = (Fault(operation="write", effect="die", index=0),)
        store = tier(faulty)
        blocks = blocks_of(store, 0, 1, 2, 3, 4)
        store._thread.join(30)
        blocks += blocks_of(store, *range(5, 12))
        assert all(block.is_right(store) for block in blocks)
        for block in blocks:
            store.free(block.extent)
        assert (store._host.live_bytes, faulty.live_bytes) == (0, 0)


class TestWhatMoved:
    @pytest.fixture
    def source(self):
        return filled(5 * MIB + 1234, seed=1)

    @pytest.fixture
    def moved(self, tier, tmp_path, source, monkeypatch):
        """A store, and an extent that moved to a file in pieces of 1 MiB."""
        monkeypatch.setattr("ssdtrain.storage.pieces.PIECE_BYTES", MIB)
        store = tier(DirectStore(tmp_path))
        extent = store.allocate(source.nbytes)
        with store.borrow(extent, write=True) as memory:
            memory.view()[:] = source.view()
        settle(store)
        return store, extent

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [
            (0, 5 * MIB + 1234),
            (0, 4 * MIB),
            (4 * MIB, MIB + 1234),
            (5 * MIB, 1234),
            (0, 1),
            (PAGE, PAGE),
            (MIB - PAGE, 2 * PAGE),
            (3 * PAGE, 3 * MIB),
            (MIB // 2, 5 * MIB + 1234 - MIB // 2),
        ],
    )
    def test_can_be_read_in_any_pieces(self, moved, source, offset, nbytes):
        got = read_back(*moved, nbytes, offset=offset)
        assert same(got, content(source)[offset : offset + nbytes])

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 5 * MIB + 1235), (5 * MIB, 1235)])
    def test_cannot_be_read_beyond_its_end(self, moved, offset, nbytes):
        store, extent = moved
        with pytest.raises(StoreError) as caught:
            store.read(extent, skewed_buffer(nbytes), offset)
        assert caught.value.errno == errno.EINVAL

    def test_is_not_written_again(self, moved, source):
        store, extent = moved
        with pytest.raises(StoreError) as caught:
            store.write(extent, source)
        assert caught.value.errno == errno.EBUSY
        with pytest.raises(StoreError), store.borrow(extent, write=True):
            pass
        assert same(read_back(store, extent, source.nbytes), content(source))

    def test_is_described_where_it_is(self, moved, tmp_path):
        store, extent = moved
        assert str(tmp_path) in store.describe(extent)
        assert store.location(extent) == str(tmp_path)
        staying = store.allocate(MIB)
        assert "host store" in store.describe(staying)
        assert store.location(staying) == "host memory"

    def test_is_described_after_closing(self, moved, tmp_path):
        store, extent = moved
        store.close()
        assert str(tmp_path) in store.describe(extent)

    def test_is_what_is_on_disk(self, moved):
        store, extent = moved
        staying = store.allocate(MIB)
        assert store.bytes_on_disk == extent.length
        assert store.live_bytes == extent.length + staying.length


class DevicesBelow(WrapperStore, DeviceStore):
    """A store that takes "device memory", which is host memory."""

    def device_store(self, extent):
        return self

    def write_device(self, extent, buffer, offset=0):
        self.write(extent, HostBuffer(buffer.address, buffer.nbytes, buffer.owner), offset)

    def read_device(self, extent, buffer, offset=0):
        self.read(extent, HostBuffer(buffer.address, buffer.nbytes, buffer.owner), offset)


def device(buffer):
    return DeviceBuffer(buffer.address, buffer.nbytes, 0, buffer)


class TestTheStoreBelowsWayToTheDevice:
    @pytest.fixture
    def store(self, tier, monkeypatch):
        monkeypatch.setattr("ssdtrain.storage.pieces.PIECE_BYTES", MIB)
        return tier(DevicesBelow(HostStore()))

    def test_is_not_for_host_memory(self, store):
        assert store.device_store(store.allocate(MIB)) is None

    def test_is_for_what_went_below_at_once(self, store):
        extent = store.allocate(BUDGET + MIB)
        source, target = filled(BUDGET + MIB, seed=1), skewed_buffer(BUDGET + MIB)
        store.device_store(extent).write_device(extent, device(source))
        store.device_store(extent).read_device(extent, device(target))
        assert same(content(target), content(source))

    def test_is_for_what_moved(self, store):
        store.allocate(MIB)  # so that extents above and below are not numbered alike
        extent = store.allocate(5 * MIB + 100)
        source, target = filled(5 * MIB + 100, seed=1), skewed_buffer(5 * MIB + 100)
        store.write(extent, source)
        settle(store)
        store.device_store(extent).read_device(extent, device(target))
        assert same(content(target), content(source))

    def test_is_for_nothing_after_closing(self, store):
        extent = store.allocate(MIB)
        store.close()
        assert store.device_store(extent) is None


class TestTheWhole:
    def test_the_path_in_use_is_named(self, tier, tmp_path):
        assert tier(DirectStore(tmp_path)).backend == "host+direct"

    def test_threads_are_those_of_the_disks(self, tier, tmp_path):
        class Two(WrapperStore):
            members = 2

        assert tier(Two(HostStore())).members == 2

    def test_nothing_grows_with_the_steps(self, tier, tmp_path):
        made = []
        slabs = SlabArena(
            lambda nbytes: made.append(nbytes) or page_aligned(nbytes), BUDGET, slab_bytes=2 * MIB
        )
        below = DirectStore(tmp_path)
        store = tier(below, slabs=slabs)
        for _ in range(60):
            blocks = blocks_of(store, *range(12))
            for block in reversed(blocks):
                assert block.is_right(store)
                store.free(block.extent)
        settle(store)
        assert sum(made) <= BUDGET
        assert (store.live_bytes, store._host.live_bytes, below.live_bytes) == (0, 0, 0)
        assert (store._places, store._movable) == ({}, {})
        assert below.file_bytes == 256 * MIB

    def test_its_thread_ends_with_it(self, tier):
        store = tier()
        assert store._thread.daemon
        store.close()
        assert not store._thread.is_alive()

    def test_both_stores_are_closed_with_it(self, tier, recording):
        store = tier(recording)
        store.close()
        for part in (store._host, recording):
            with pytest.raises(StoreError, match="closed"):
                part.allocate(1)

    def test_a_thread_that_cannot_be_started_is_an_error(self, monkeypatch):
        def refuse(_thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(SSDTrainError, match=r"host_memory_bytes: .*can't start new thread"):
            TieredStore(HostStore(max_bytes=MIB), HostStore())


def test_an_offloader_that_is_collected_on_the_thread_is_closed(tier):
    """As when a garbage collection there finds it."""
    collected = threading.Event()

    class Collecting(WrapperStore):
        def write(self, extent, buffer, offset=0):
            super().write(extent, buffer, offset)
            if on_the_thread(extent, buffer.nbytes):
                finalize()
                collected.set()

    store = tier(Collecting(HostStore()), max_bytes=64 << 10)
    offload = OffloadOver(store, min_tensor_bytes=1)
    finalize = offload._session._engine.close_from_finalizer
    with offload:
        loss = torch.randn(100, 100, requires_grad=True).sin().sum()
    assert collected.wait(30)
    del loss
    eventually(lambda: not store._thread.is_alive())
