"""Several threads over one offloader, with pauses wherever one thread could overtake another.

The pauses are the stress, and nothing waits for them: before and after every change of a block's state, before and
after every lock of ours is taken and given back, and now and then at any line of the engine. Whatever order comes of
it, the bits are those of plain torch.
"""

import gc
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ssdtrain
from ssdtrain import ActivationLostError, InplaceModificationError, SSDTrainError
from ssdtrain.block import Block
from ssdtrain.storage import DirectStore, HostStore
from ssdtrain.testing import Fault, FaultyStore, OffloadOver, ReorderingStore, SlowStore

from .helpers import KIB, assert_nothing_left, assert_same_bits, io_threads
from .programs import forget_failed_backward

THREADS = 3
STEPS = 6
SECONDS = 100
PACKAGE = Path(ssdtrain.__file__).parent
TRACED = {
    str(PACKAGE / f"{name}.py")
    for name in (
        *("engine", "block", "budgets", "workers", "schedule", "offload"),
        *("memory/pool", "storage/direct", "storage/extents", "storage/spill_file"),
    )
}
# That make locks.
LOCKING = ("engine", "memory.pool", "storage.direct", "storage.host", "storage.spill_file")


class Pauses:
    """Of up to some hundred microseconds, or none.

    Args:
        seed: Of how long and how often.
    """

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._longest = self._random.choice([0, 50e-6, 300e-6])
        self._at_lines = self._random.choice([0, 0.002, 0.02])
        self._switch_interval = self._random.choice([1e-6, 1e-5, 1e-4, 5e-3])
        self.taken = 0

    def __call__(self):
        """Let others go first, perhaps, or a garbage collection find a handle."""
        self.taken += 1
        luck = self._random.random()
        if luck < 0.5:
            time.sleep(luck * self._longest)
        elif luck > 0.97:
            gc.collect(1)

    def trace(self, frame, _event, _argument):
        """For `sys.settrace`."""
        return self._line if frame.f_code.co_filename in TRACED else None

    def _line(self, _frame, event, _argument):
        if event == "line" and self._random.random() < self._at_lines:
            self()
        return self._line

    @contextmanager
    def everywhere(self, monkeypatch):
        """In all threads that are made inside, and in this one."""
        move = Block.move

        def pausing_move(block, to):
            self()
            move(block, to)
            self()

        monkeypatch.setattr(Block, "move", pausing_move)
        ours = SimpleNamespace(**vars(threading))
        ours.Lock = lambda: PausingLock(self)
        for name in LOCKING:
            monkeypatch.setattr(sys.modules[f"ssdtrain.{name}"], "threading", ours)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(self._switch_interval)
        if self._at_lines:
            threading.settrace(self.trace)
        try:
            yield
        finally:
            threading.settrace(None)
            sys.setswitchinterval(interval)


class PausingLock:
    """A lock with pauses on both sides."""

    def __init__(self, pause):
        self._pause = pause
        self._lock = threading.Lock()

    def acquire(self, blocking=True, timeout=-1):
        self._pause()
        taken = self._lock.acquire(blocking, timeout)
        self._pause()
        return taken

    def release(self):
        self._pause()
        self._lock.release()
        self._pause()

    def locked(self):
        return self._lock.locked()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *exception):
        self.release()


class Work:
    """Some steps of one thread, the same for the same seed.

    Args:
        seed: Of inputs and of what becomes of each graph.
    """

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self._inputs = [torch.randn(24, 24, generator=generator) for _ in range(STEPS)]
        self._weight = torch.randn(24, 24, generator=generator)
        ends = ["backward", "twice", "elsewhere", "settled", "dropped", "changed", "changed and settled"]
        self._ends = random.Random(seed).choices(ends, k=STEPS)

    def run(self, context, others, settle=None):
        """The gradients of every step, or the kind of error, or None for a graph that is dropped.

        Args:
            context: Around the forward passes.
            others: An executor, for backward passes in another thread.
            settle: Called now and then; None: plain torch, where nothing is changed in place either.
        """
        return [
            self._step(values, end, context, others, settle)
            for values, end in zip(self._inputs, self._ends, strict=True)
        ]

    def _step(self, values, end, context, others, settle):
        leaves = values.clone().requires_grad_(), self._weight.clone().requires_grad_()
        try:
            with context:
                loss, changeable = self._forward(*leaves)
            if end == "dropped":
                cycle = [loss]
                cycle.append(cycle)
                return None
            if end.startswith("changed") and settle is not None:
                changeable.detach().mul_(3)
            if end.endswith("settled") and settle is not None:
                settle()
            if end == "elsewhere":
                return others.submit(self._gradients, loss, leaves).result(SECONDS)
            if end == "twice":
                self._gradients(loss, leaves, retain_graph=True)
            return self._gradients(loss, leaves)
        except SSDTrainError as error:
            # Without its traceback, which holds the graph.
            return type(error)

    @staticmethod
    def _forward(x, weight):
        y = x
        for _ in range(4):
            y = (y @ weight).tanh()
            shifted = y + 1
            shifted.sin()  # saves it, and is gone before it is saved again
            left, right = y.chunk(2)
            y = torch.cat([left.sin() * right, right.exp()]) + y.t() + shifted.cos()
        changeable = y * 1
        return changeable.sin().sum() + y[3].square().sum(), changeable

    @staticmethod
    def _gradients(loss, leaves, *, retain_graph=False):
        try:
            return torch.autograd.grad(loss, leaves, retain_graph=retain_graph)
        except SSDTrainError:
            forget_failed_backward()
            raise


def stress(seed, store, monkeypatch, *, allowed=(InplaceModificationError,), meanwhile=lambda _: None):
    """Run the threads, compare what they got, and look at what is left.

    Args:
        seed: Of everything.
        store: Makes what is offloaded into; called where locks have pauses.
        monkeypatch: Of pytest.
        allowed: What may be raised instead of giving gradients.
        meanwhile: Called with the offloader, while the threads run, again and again.
    """
    pauses = Pauses(seed)
    choose = random.Random(seed).choice
    options = {
        "prefetch_bytes": choose([0, 4 * KIB, 1024 * KIB]),
        "store_queue_bytes": choose([1, 8 * KIB, 1024 * KIB]),
        "on_full_queue": choose(["keep", "wait"]),
        "io_threads": choose([1, 2, 4]),
    }
    works = [Work(THREADS * seed + number) for number in range(THREADS)]
    with ThreadPoolExecutor(1) as others:
        wanted = [work.run(nullcontext(), others) for work in works]
    before = len(io_threads())
    with pauses.everywhere(monkeypatch):
        offload = OffloadOver(store(), min_tensor_bytes=1, **options)
        with ThreadPoolExecutor(THREADS) as threads, ThreadPoolExecutor(2) as others:
            running = [threads.submit(work.run, offload, others, offload.synchronize) for work in works]
            while not all(one.done() for one in running):
                meanwhile(offload)
                time.sleep(0.001)
            got = [one.result() for one in running]
            del running
        assert_nothing_left(offload)
        offload.close()
    assert pauses.taken > 0
    assert len(io_threads()) == before
    for mine, plain in zip(got, wanted, strict=True):
        for one, other in zip(mine, plain, strict=True):
            if isinstance(one, type):
                assert one in allowed
            elif other is None:
                assert one is None
            else:
                assert_same_bits(one, other)


def seeds(fast, slow):
    """The first few always, the others with `scripts/test --all`."""
    return pytest.mark.parametrize(
        "seed", [*range(fast), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(fast, slow))]
    )


def look(offload):
    """At the counters, which works off what has died."""
    assert offload.stats.live_blocks >= 0


@pytest.mark.filterwarnings("ignore:ssdtrain keeps activations:RuntimeWarning")
class TestPauses:
    @seeds(8, 100)
    def test_over_files(self, tmp_path, monkeypatch, seed):
        stress(seed, lambda: DirectStore(tmp_path), monkeypatch, meanwhile=look)

    @seeds(4, 60)
    def test_over_a_store_that_reorders(self, tmp_path, monkeypatch, seed):
        stress(seed, lambda: ReorderingStore(DirectStore(tmp_path), seed=seed), monkeypatch)

    @seeds(4, 60)
    def test_over_a_store_that_fails(self, monkeypatch, seed):
        def store():
            faults = [
                Fault(operation="allocate", probability=0.1),
                Fault(operation="write", probability=0.2),
                Fault(operation="write", effect="short", probability=0.1),
                Fault(operation="read", probability=0.05),
            ]
            return FaultyStore(SlowStore(HostStore(), latency=0.0002), *faults, seed=seed)

        stress(seed, store, monkeypatch, allowed=(InplaceModificationError, ActivationLostError))

    @seeds(4, 60)
    def test_closed_in_the_middle(self, tmp_path, monkeypatch, seed):
        left = random.Random(seed).randint(1, 60)

        def close_in_the_end(offload):
            nonlocal left
            left -= 1
            if left == 0:
                offload.close()

        allowed = (InplaceModificationError, ActivationLostError, SSDTrainError)
        stress(seed, lambda: DirectStore(tmp_path), monkeypatch, allowed=allowed, meanwhile=close_in_the_end)
