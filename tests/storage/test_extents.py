"""The allocator of a spill file."""

import time
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ssdtrain.storage.extents import ExtentAllocator, ShrinkPolicy

PAGE = 4096


class AnyOrderOfCalls(RuleBasedStateMachine):
    """Whatever is allocated, freed, grown and cut in whatever order, the ranges tile the file."""

    def __init__(self):
        super().__init__()
        self.extents = ExtentAllocator(PAGE)
        self.live = {}

    offsets = Bundle("offsets")

    @rule(target=offsets, nbytes=st.integers(1, 20 * PAGE))
    def allocate(self, nbytes):
        longest = max((length for _, length in self.extents.free_ranges()), default=0)
        missing = self.extents.missing(nbytes)
        offset = self.extents.allocate(nbytes)
        assert (offset is None) == (longest < nbytes)
        if offset is None:
            self.extents.grow(missing)
            offset = self.extents.allocate(nbytes)
            assert offset is not None
        assert offset not in self.live
        self.live[offset] = -(-nbytes // PAGE) * PAGE
        return offset

    @rule(offset=consumes(offsets))
    def free(self, offset):
        del self.live[offset]
        self.extents.free(offset)

    @rule(pages=st.integers(1, 50))
    def grow(self, pages):
        self.extents.grow(pages * PAGE)

    @rule(share=st.floats(0, 1))
    def shrink(self, share):
        cut = int(self.extents.trailing_free * share) // PAGE * PAGE
        size = self.extents.size
        self.extents.shrink(size - cut)
        assert self.extents.size == size - cut

    @invariant()
    def live_and_free_ranges_tile_the_file(self):
        ranges = sorted(self.extents.live_ranges() + self.extents.free_ranges())
        assert all(start % PAGE == 0 and length % PAGE == 0 and length > 0 for start, length in ranges)
        assert all(start + length == following for (start, length), (following, _) in pairwise(ranges))
        assert sum(length for _, length in ranges) == self.extents.size
        assert not ranges or ranges[0][0] == 0

    @invariant()
    def free_neighbours_are_merged(self):
        free = self.extents.free_ranges()
        assert all(start + length < following for (start, length), (following, _) in pairwise(free))

    @invariant()
    def the_accounting_is_right(self):
        assert dict(self.extents.live_ranges()) == self.live
        assert self.extents.live_bytes == sum(self.live.values())
        assert self.extents.live_count == len(self.live)
        end = max((start + length for start, length in self.live.items()), default=0)
        assert self.extents.trailing_free == self.extents.size - end
        assert self.extents.high_water >= end


TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_tightest_hole_is_taken():
    extents = ExtentAllocator(PAGE)
    extents.grow(20 * PAGE)
    large, _, small, _ = (extents.allocate(pages * PAGE) for pages in (6, 1, 3, 1))
    extents.free(large)
    extents.free(small)
    assert extents.allocate(3 * PAGE) == small


def test_of_equal_holes_the_first_is_taken():
    extents = ExtentAllocator(PAGE)
    extents.grow(10 * PAGE)
    first, _, second, _ = (extents.allocate(2 * PAGE) for _ in range(4))
    extents.free(second)
    extents.free(first)
    assert extents.allocate(2 * PAGE) == first


def test_a_repeated_step_reuses_the_same_ranges():
    extents = ExtentAllocator(PAGE)
    extents.grow(64 * PAGE)
    sizes = [PAGE * pages for pages in (5, 1, 9, 2, 5, 9)]
    steps = []
    for _ in range(3):
        offsets = [extents.allocate(size) for size in sizes]
        for offset in reversed(offsets):
            extents.free(offset)
        steps.append(offsets)
    assert steps[0] == steps[1] == steps[2]


def test_missing_counts_the_free_end():
    extents = ExtentAllocator(PAGE)
    extents.grow(4 * PAGE)
    extents.allocate(3 * PAGE)
    assert extents.missing(3 * PAGE) == 2 * PAGE


def test_live_bytes_cannot_be_cut_off():
    extents = ExtentAllocator(PAGE)
    extents.grow(4 * PAGE)
    extents.allocate(2 * PAGE)
    with pytest.raises(AssertionError):
        extents.shrink(PAGE)


def test_freeing_twice_is_noticed():
    extents = ExtentAllocator(PAGE)
    extents.grow(PAGE)
    offset = extents.allocate(1)
    extents.free(offset)
    with pytest.raises(KeyError):
        extents.free(offset)


def test_ten_thousand_live_extents_are_not_slow():
    extents = ExtentAllocator(PAGE)
    extents.grow(40_000 * PAGE)
    offsets = [extents.allocate((1 + at % 3) * PAGE) for at in range(15_000)]
    for offset in offsets[::3]:
        extents.free(offset)
    assert extents.live_count == 10_000
    began = time.perf_counter()
    for at in range(2_000):
        extents.free(extents.allocate((1 + at % 5) * PAGE))
    # Some 5 microseconds for each pair; a scan of all holes would take a hundred times that.
    assert (time.perf_counter() - began) / 2_000 < 200e-6


def test_a_file_is_not_cut_before_enough_cycles_agree():
    policy = ShrinkPolicy(cycles=3, step=10)
    policy.record(5)
    policy.record(5)
    assert policy.target(100) == 100


def test_a_file_is_cut_to_what_the_last_cycles_needed():
    policy = ShrinkPolicy(cycles=3, step=10)
    for peak in (100, 5, 31, 5):
        policy.record(peak)
    assert policy.target(100) == 40


def test_one_large_cycle_keeps_the_file():
    policy = ShrinkPolicy(cycles=3, step=10)
    for peak in (5, 90, 5):
        policy.record(peak)
    assert policy.target(100) == 100


def test_less_than_half_is_not_worth_cutting():
    policy = ShrinkPolicy(cycles=1, step=10)
    policy.record(50)
    assert policy.target(100) == 100


def test_a_gap_keeps_free_ranges_apart():
    extents = ExtentAllocator(alignment=10)
    for _ in range(2):
        extents.leave_gap()
        extents.grow(40)
    for offset in [extents.allocate(40) for _ in range(2)]:
        extents.free(offset)
    assert extents.free_ranges() == [(10, 40), (60, 40)]
    assert extents.allocate(50) is None
