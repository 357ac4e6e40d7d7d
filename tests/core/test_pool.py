"""The memory that restored blocks live in: at the right place in a page, used again, given back."""

import ctypes
import gc
import threading

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.memory.pool import BufferPool
from ssdtrain.storage.extents import ExtentAllocator

from .helpers import KIB, MIB

PAGE = 4096


@pytest.fixture
def pool():
    return BufferPool(16 * MIB)


def resident(address, nbytes):
    """Bytes of a range that have memory behind them."""
    libc = ctypes.CDLL(None, use_errno=True)
    start = address // PAGE * PAGE
    pages = -(-(address + nbytes - start) // PAGE)
    answer = (ctypes.c_ubyte * pages)()
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * PAGE), answer) == 0
    return sum(page & 1 for page in answer) * PAGE


@pytest.mark.parametrize("skew", [0, 1, 64, 512, 4095])
@pytest.mark.parametrize("nbytes", [1, 100, PAGE, 100_000, 32 * MIB])
def test_memory_begins_where_it_is_told_to_within_a_page(pool, skew, nbytes):
    region = pool.take(nbytes, skew)
    assert region.address % PAGE == skew
    ctypes.memset(region.address, 1, nbytes)
    tensor = region.tensor()
    assert (tensor.data_ptr(), tensor.nbytes) == (region.address, nbytes)


def test_regions_do_not_overlap(pool):
    regions = [
        pool.take(size, skew) for size in (1, PAGE, 10_000, 5 * MIB) for skew in (0, 64) for _ in range(3)
    ]
    tensors = []
    for at, region in enumerate(regions):
        tensors.append(region.tensor().fill_(at))
    assert all((tensor == at).all() for at, tensor in enumerate(tensors))


def test_memory_is_used_again_when_its_last_view_has_died(pool):
    tensor = pool.take(MIB, 64).tensor()
    address = tensor.data_ptr()
    view = tensor[1000:2000]
    del tensor
    gc.collect()
    other = pool.take(MIB, 64)
    assert other.address != address
    del view
    assert pool.take(MIB, 64).address == address


def test_a_region_that_was_never_made_a_tensor_comes_back(pool):
    address = pool.take(MIB, 0).address
    assert pool.take(MIB, 0).address == address


def test_room_of_small_regions_serves_a_large_one(pool):
    small = [pool.take(MIB, 0) for _ in range(16)]
    lowest = min(region.address for region in small)
    del small
    assert pool.take(16 * MIB, 0).address == lowest


def test_what_does_not_fit_has_memory_of_its_own(pool):
    first = pool.take(12 * MIB, 0)
    second = pool.take(12 * MIB, 64)
    ctypes.memset(first.address, 1, 12 * MIB)
    ctypes.memset(second.address, 2, 12 * MIB)
    assert second.address % PAGE == 64


def test_trimming_gives_free_memory_back(pool):
    region = pool.take(8 * MIB, 0)
    ctypes.memset(region.address, 1, 8 * MIB)
    address = region.address
    assert resident(address, 8 * MIB) == 8 * MIB
    del region
    pool.trim()
    assert resident(address, 8 * MIB) == 0


def test_trimming_leaves_used_memory_alone(pool):
    regions = [pool.take(MIB, 0) for _ in range(8)]
    for at, region in enumerate(regions):
        ctypes.memset(region.address, at, MIB)
    del regions[::2]
    pool.trim()
    for region, value in zip(regions[:4], (1, 3, 5, 7), strict=False):
        assert ctypes.string_at(region.address, MIB) == bytes([value]) * MIB


def test_memory_can_be_used_after_trimming(pool):
    for _ in range(3):
        region = pool.take(MIB, 64)
        ctypes.memset(region.address, 7, MIB)
        del region
        pool.trim()


def test_a_reserved_range_takes_memory_only_where_it_is_touched(pool):
    region = pool.reserve(1 << 30, 64)
    assert region.address % PAGE == 64
    ctypes.memset(region.address + 500 * MIB, 1, 64 * KIB)
    assert resident(region.address, 1 << 30) <= 4 * MIB


def test_several_threads(pool):
    wrong = []

    def work(thread):
        for turn in range(100):
            nbytes = 1000 * (thread + 1) + turn
            tensor = pool.take(nbytes, 64 * thread).tensor().fill_(thread)
            if not (tensor == thread).all():
                wrong.append(thread)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_views_outlive_the_pool():
    pool = BufferPool(MIB)
    tensor = pool.take(100_000, 0).tensor().fill_(3)
    del pool
    gc.collect()
    assert (tensor == 3).all()


def test_an_interrupt_in_the_middle_of_the_arithmetic_costs_the_arena_only(pool, monkeypatch):
    """Whether a range is free can then not be told."""

    def interrupted(_ranges, _nbytes):
        raise KeyboardInterrupt

    before = pool.take(MIB, 64).tensor().fill_(1)
    with monkeypatch.context() as patch:
        patch.setattr(ExtentAllocator, "allocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.take(MIB, 64)
    others = [pool.take(MIB, 64).tensor().fill_(2) for _ in range(3)]
    pool.trim()
    assert (before == 1).all()
    assert all((other == 2).all() for other in others)


def test_more_address_space_than_there_is():
    with pytest.raises(ConfigError, match="choose a smaller one"):
        BufferPool(1 << 60)
