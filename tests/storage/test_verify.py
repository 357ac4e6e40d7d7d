"""Whether checksums find what changed on the way."""

import errno
import os
import sys

import pytest

from ssdtrain.errors import ConfigError, StoreError
from ssdtrain.storage import PAGE, DirectStore, HostStore, VerifyingStore
from ssdtrain.testing import Fault, FaultyStore, WrapperStore
from ssdtrain.testing.suite import content, filled, same, skewed_buffer

from .helpers import look_under

MIB = 1 << 20

pytest.importorskip("xxhash")


@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.parametrize("nbytes", [1, 4097, MIB + 100])
def test_one_wrong_bit_is_found(operation, nbytes):
    store = VerifyingStore(FaultyStore(HostStore(), Fault(operation=operation, effect="flip")))
    extent = store.allocate(nbytes)
    store.write(extent, filled(nbytes, seed=1))
    with pytest.raises(StoreError, match="checksum mismatch") as caught:
        store.read(extent, skewed_buffer(nbytes))
    assert caught.value.errno == errno.EIO


def test_a_byte_changed_on_disk_is_found_and_placed(tmp_path):
    inner = DirectStore(tmp_path)
    store = VerifyingStore(inner)
    store.allocate(PAGE)
    extent = store.allocate(MIB)
    store.write(extent, filled(MIB, seed=2))
    with look_under(inner) as fd:
        os.pwrite(fd, b"changed!", extent.offset + MIB // 2)
        os.fsync(fd)
    with pytest.raises(StoreError, match=f"{MIB} bytes at offset {PAGE} ") as caught:
        store.read(extent, skewed_buffer(MIB))
    assert caught.value.filename == str(tmp_path)
    store.close()


def test_pieces_have_checksums_of_their_own():
    store = VerifyingStore(HostStore())
    extent = store.allocate(2 * MIB)
    store.write(extent, filled(MIB, seed=3), 0)
    store.write(extent, filled(MIB, seed=4), MIB)
    store.read(extent, skewed_buffer(MIB), 0)
    store.read(extent, skewed_buffer(MIB), MIB)
    assert len(set(extent.checksums.values())) == 2


def test_a_failed_rewrite_leaves_no_checksum():
    store = VerifyingStore(FaultyStore(HostStore(), Fault(operation="write", index=1)))
    extent = store.allocate(MIB)
    store.write(extent, filled(MIB, seed=5))
    with pytest.raises(StoreError):
        store.write(extent, filled(MIB, seed=6))
    with pytest.raises(StoreError, match="no write succeeded"):
        store.read(extent, skewed_buffer(MIB))


def test_a_missing_xxhash_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"pip install 'ssdtrain\[verify\]'"):
        VerifyingStore(HostStore())


class Neighbour(WrapperStore):
    """While it writes, somebody changes another byte of the buffer, `times` times in all."""

    def __init__(self, inner, times):
        super().__init__(inner)
        self.times = times

    def write(self, extent, buffer, offset=0):
        super().write(extent, buffer, offset)
        if self.times:
            self.times -= 1
            buffer.view()[0] += 1


def test_a_buffer_that_changes_during_the_write_is_written_again():
    """Its checksum is that of what was written, whether or not somebody wants the bytes that changed."""
    store = VerifyingStore(Neighbour(HostStore(), times=2))
    extent, source = store.allocate(MIB), filled(MIB, seed=8)
    store.write(extent, source)
    destination = skewed_buffer(MIB)
    store.read(extent, destination)
    assert same(content(destination), content(source))


def test_a_buffer_that_never_keeps_still_is_an_error():
    store = VerifyingStore(Neighbour(HostStore(), times=1000))
    extent = store.allocate(MIB)
    with pytest.raises(StoreError, match="keeps changing") as caught:
        store.write(extent, filled(MIB, seed=9))
    assert caught.value.errno == errno.EBUSY
    with pytest.raises(StoreError, match="no checksum"):
        store.read(extent, skewed_buffer(MIB))
