"""The C library's heap gives back what offloading freed."""

import json
import subprocess
import sys

import pytest
import torch

from ssdtrain.device.cpu import CpuTransfer
from ssdtrain.memory import heap
from ssdtrain.memory.heap import HeapTrimmer

MIB = 1 << 20

HOLES = """
import ctypes, json, os, sys
import torch
from ssdtrain.memory import heap
from ssdtrain.storage import DirectStore
from ssdtrain.testing import GatedStore, OffloadOver

libc = ctypes.CDLL(None)
if not hasattr(libc, "malloc_trim"):
    print("null")
    sys.exit()
libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: everything comes from the heap
torch.set_num_threads(1)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

heap._MOST_TIME = 1e9
store = GatedStore(DirectStore(sys.argv[1]), hold=("write",))
offload = OffloadOver(store, store_queue_bytes=1 << 30)
offload._session._transfers._cpu._heap = heap.HeapTrimmer(every=int(sys.argv[2]))
before = resident()
x = torch.zeros(1 << 20, requires_grad=True)  # 4 MiB
pins = []
with offload:
    y = x
    for _ in range(32):
        y = y.exp()
        pins.append(torch.ones(1 << 14))  # between two large ones: no free chunk becomes the heap's end
    store.open("write")  # not before: what is freed in between would be used again
    offload.synchronize()
    z = x.exp()  # a block passes after the others were freed
print(json.dumps(resident() - before))
"""


def growth_over_128_mib(tmp_path, every):
    command = [sys.executable, "-c", HOLES, str(tmp_path), str(every)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    growth = json.loads(done.stdout)
    if growth is None:
        pytest.skip("this C library has no malloc_trim")
    return growth


class Clock:
    """Time that only trims move, each by a second."""

    def __init__(self):
        self.now = 100.0
        self.trims = 0

    def trim(self):
        self.trims += 1
        self.now += 1.0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(heap, "trim_heap", clock.trim)
    monkeypatch.setattr(heap.time, "monotonic", lambda: clock.now)
    return clock


def test_holes_go_back_to_the_system(tmp_path):
    assert growth_over_128_mib(tmp_path, 4 * MIB) < 48 * MIB


def test_without_a_trim_they_do_not(tmp_path):
    assert growth_over_128_mib(tmp_path, 1 << 40) > 120 * MIB


def test_every_block_that_is_packed_or_unpacked_counts(make_offload, monkeypatch):
    passed = []
    monkeypatch.setattr(CpuTransfer, "passed", lambda _, nbytes: passed.append(nbytes))
    x = torch.ones(1000, requires_grad=True)
    with make_offload():
        y = x.exp().exp()
    assert passed == [4000, 4000]
    y.sum().backward()
    assert passed == [4000] * 4


def test_a_trim_is_due_when_so_many_bytes_have_passed(clock):
    trimmer = HeapTrimmer(every=100)
    trimmer.passed(60)
    trimmer.passed(39)
    assert clock.trims == 0
    trimmer.passed(1)
    assert clock.trims == 1


def test_trims_that_take_long_are_rare(clock):
    """A trim that took a second waits for 50."""
    trimmer = HeapTrimmer(every=1)
    for _ in range(3):
        trimmer.passed(1)
    assert clock.trims == 1
    clock.now += 49.0
    trimmer.passed(1)
    assert clock.trims == 1
    clock.now += 1.0
    trimmer.passed(1)
    assert clock.trims == 2
