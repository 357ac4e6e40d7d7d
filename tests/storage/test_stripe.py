"""How blocks are spread over several directories, and what happens when one of them gives up."""

import errno
import threading

import pytest

from ssdtrain.errors import StoreError
from ssdtrain.storage import DirectStore, HostStore, StripeStore, stripe
from ssdtrain.testing import Fault, FaultyStore, GatedStore, WrapperStore
from ssdtrain.testing.suite import content, filled, read_back, same

MIB = 1 << 20


def members_of(extents):
    return [extent.member for extent in extents]


class TestSpreading:
    def test_equal_blocks_go_round(self):
        store = StripeStore([HostStore() for _ in range(3)])
        assert members_of(store.allocate(MIB) for _ in range(6)) == [0, 1, 2, 0, 1, 2]

    def test_a_large_block_is_balanced_by_small_ones(self):
        store = StripeStore([HostStore(), HostStore()])
        assert members_of(store.allocate(nbytes) for nbytes in (4 * MIB, MIB, MIB, MIB)) == [0, 1, 1, 1]

    def test_a_member_that_is_writing_is_spared(self):
        slow = GatedStore(HostStore(), hold=("write",))
        store = StripeStore([slow, HostStore()])
        first = store.allocate(MIB)
        writer = threading.Thread(target=store.write, args=(first, filled(MIB, seed=1)))
        writer.start()
        slow.wait_for("write")
        assert members_of(store.allocate(MIB) for _ in range(3)) == [1, 1, 1]
        slow.open("write")
        writer.join(30)
        assert store.allocate(MIB).member == 0

    def test_a_block_is_whole_on_one_directory(self, tmp_path):
        (tmp_path / "one").mkdir()
        (tmp_path / "two").mkdir()
        parts = [DirectStore(tmp_path / "one"), DirectStore(tmp_path / "two")]
        store = StripeStore(parts)
        for member in (0, 1):
            source = filled(MIB, seed=member)
            extent = store.allocate(MIB)
            store.write(extent, source)
            assert extent.member == member
            assert same(read_back(parts[member], extent, MIB), content(source))
            assert store.location(extent) == str(tmp_path / ("one", "two")[member])
            assert str(tmp_path / ("one", "two")[member]) in store.describe(extent)
        store.close()

    def test_members_are_counted(self):
        assert StripeStore([HostStore(), StripeStore([HostStore(), HostStore()])]).members == 3


class TestRefusals:
    def test_a_full_member_is_passed_over(self):
        store = StripeStore([HostStore(max_bytes=MIB), HostStore()])
        assert members_of(store.allocate(MIB) for _ in range(4)) == [0, 1, 1, 1]

    def test_the_first_refusal_is_raised_when_all_refuse(self):
        broken = FaultyStore(HostStore(), Fault(operation="allocate", errno=errno.EIO))
        store = StripeStore([broken, HostStore(max_bytes=MIB)])
        store.allocate(MIB)
        with pytest.raises(StoreError) as caught:
            store.allocate(MIB)
        assert caught.value.errno == errno.EIO

    def test_a_failing_write_is_raised_and_the_member_rests(self):
        broken = FaultyStore(HostStore(), Fault(operation="write"))
        store = StripeStore([broken, HostStore()])
        extent = store.allocate(MIB)
        with pytest.raises(StoreError):
            store.write(extent, filled(MIB, seed=2))
        store.free(extent)
        placed = members_of(store.allocate(MIB) for _ in range(stripe.REST_AFTER_FAILURE + 1))
        assert placed == [1] * stripe.REST_AFTER_FAILURE + [0]

    def test_a_resting_member_is_used_when_no_other_has_room(self):
        broken = FaultyStore(HostStore(), Fault(operation="write", index=0))
        store = StripeStore([broken, HostStore(max_bytes=MIB)])
        extent = store.allocate(MIB)
        with pytest.raises(StoreError):
            store.write(extent, filled(MIB, seed=3))
        assert members_of(store.allocate(MIB) for _ in range(2)) == [1, 0]


class TestBackend:
    def test_equal_backends_are_named_once(self):
        assert StripeStore([HostStore(), HostStore()]).backend == "host"

    def test_different_backends_are_all_named(self, tmp_path):
        store = StripeStore([DirectStore(tmp_path), DirectStore(tmp_path, direct=False)])
        assert store.backend == "direct+buffered"
        store.close()


class TestClosing:
    def test_every_member_is_closed_when_one_fails_to(self):
        class Stuck(WrapperStore):
            def close(self):
                raise StoreError(errno.EIO, "cannot close", "here")

        last = HostStore()
        store = StripeStore([Stuck(HostStore()), last])
        with pytest.raises(StoreError, match="cannot close"):
            store.close()
        with pytest.raises(StoreError):
            last.allocate(1)
