"""Faults of every kind around a run: interrupts, slow and full disks, dead threads, processes that end."""

import gc
import shutil
import signal
import threading
import time

import pytest
import torch

from ssdtrain import SSDTrainError
from ssdtrain.block import Block
from ssdtrain.storage import HostStore
from ssdtrain.testing import SlowStore, WrapperStore
from ssdtrain.workers import Workers

from .helpers import (
    KIB,
    assert_nothing_left,
    assert_same_bits,
    assert_transparent,
    backward,
    leaf,
    mlp,
    model_program,
    run_python,
)

PROGRAM = model_program(mlp, 16, 64)
BLOCK = 16 * KIB


def chain(x, length=8):
    """Every link saves one block of 16 KiB, that nothing else saves."""
    for _ in range(length):
        x = x.sin()
    return x.sum()


def assert_clean_step(offload):
    """In a thread, so that a test of what may hang ends."""
    gc.collect()
    errors = []

    def step():
        try:
            assert_transparent(PROGRAM, offload)
            assert_nothing_left(offload)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test fails with it
            errors.append(error)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "the step after the fault hangs, or leaves something"
    assert errors == []


class Interrupting(torch.autograd.Function):
    """A Ctrl-C arrives while it runs, forward or backward."""

    @staticmethod
    def forward(ctx, x, now):
        if now:
            signal.raise_signal(signal.SIGINT)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        signal.raise_signal(signal.SIGINT)
        return grad, None


class TestInterrupts:
    """KeyboardInterrupt by a real signal, wherever it comes; the next step is clean."""

    @pytest.fixture(autouse=True)
    def python_handles_interrupts(self):
        """Not so by default in a job in the background."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    def test_in_forward(self, offload):
        def forward():
            with offload:
                return Interrupting.apply(leaf(64, 64).exp().sin(), True)

        with pytest.raises(KeyboardInterrupt):
            forward()
        assert_clean_step(offload)

    @pytest.mark.parametrize("settle", [True, False])
    def test_in_backward(self, offload, settle):
        with offload:
            loss = Interrupting.apply(leaf(64, 64).exp().sin(), False).tanh().sum()
        if settle:
            offload.synchronize()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        del loss
        assert_clean_step(offload)

    def test_in_the_hook_of_a_tensor(self, offload):
        with offload:
            y = leaf(64, 64).exp()
            loss = y.sin().tanh().sum()
        y.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
        offload.synchronize()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        del y, loss
        assert_clean_step(offload)

    def test_a_graph_that_was_retained_can_be_walked_again(self, offload):
        x = leaf(64, 64)
        with offload:
            y = x.exp()
            loss = chain(y)
        offload.synchronize()
        hook = y.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            loss.backward(retain_graph=True)
        hook.remove()
        loss.backward()
        wanted = backward(lambda: ([x.detach().requires_grad_()], lambda x: chain(x.exp())))
        assert_same_bits([loss, x.grad], wanted)
        del y, loss
        assert_clean_step(offload)

    def test_while_backward_reads(self, make_offload):
        class InterruptedOnce(WrapperStore):
            armed = True

            def read(self, extent, buffer, offset=0):
                if self.armed and threading.current_thread() is threading.main_thread():
                    self.armed = False
                    signal.raise_signal(signal.SIGINT)
                super().read(extent, buffer, offset)

        store = InterruptedOnce(HostStore())
        offload = make_offload(store=store)
        x = leaf(64, 64)
        with offload:
            loss = chain(x)
        offload.synchronize()
        with pytest.raises(KeyboardInterrupt):
            loss.backward(retain_graph=True)
        assert not store.armed
        loss.backward()
        assert_same_bits([loss, x.grad], backward(lambda: ([x.detach().requires_grad_()], chain)))
        del loss
        assert_clean_step(offload)

    @pytest.mark.parametrize("waiting", ["for room", "for all writes"])
    def test_while_the_disk_is_waited_for(self, make_offload, gated, waiting):
        options = {"on_full_queue": "wait", "store_queue_bytes": 1} if waiting == "for room" else {}
        offload = make_offload(store=gated, io_threads=1, **options)

        def interrupt():
            gated.wait_for("write")
            time.sleep(0.2)  # the main thread then waits, too
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        def step():
            with offload:
                loss = chain(leaf(64, 64))
            offload.synchronize()
            return loss

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            step()
        thread.join()
        gated.open("write")
        assert_clean_step(offload)

    @pytest.fixture
    def interrupt_after(self, monkeypatch):
        """Has a Ctrl-C arrive at the end of the next call of a method: in the middle of ssdtrain's own work."""

        def arm(owner, name):
            method = getattr(owner, name)

            def interrupted(*arguments):
                result = method(*arguments)
                monkeypatch.setattr(owner, name, method)
                signal.raise_signal(signal.SIGINT)
                return result

            monkeypatch.setattr(owner, name, interrupted)

        return arm

    def test_while_a_block_is_queued(self, offload, interrupt_after):
        def forward():
            with offload:
                return leaf(64, 64).exp()

        interrupt_after(Block, "move")
        with pytest.raises(KeyboardInterrupt):
            forward()
        assert_clean_step(offload)

    def test_before_a_block_is_read(self, offload, interrupt_after):
        with offload:
            loss = leaf(64, 64).exp().sum()
        offload.synchronize()
        interrupt_after(Workers, "wake")
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        del loss
        assert_clean_step(offload)


class TestErrorsInUnpack:
    def test_no_memory_to_read_into(self, make_offload):
        """The error is that of Python; nothing is left of the step."""

        class Greedy(WrapperStore):
            full = True

            def read(self, extent, buffer, offset=0):
                if self.full:
                    raise MemoryError
                super().read(extent, buffer, offset)

        store = Greedy(HostStore())
        offload = make_offload(store=store)
        with offload:
            loss = chain(leaf(64, 64))
        offload.synchronize()
        with pytest.raises(MemoryError):
            loss.backward()
        store.full = False
        del loss
        assert_clean_step(offload)

    def test_in_another_unpack_hook(self, offload):
        def broken(_):
            raise ZeroDivisionError

        with offload:
            y = leaf(64, 64).exp()
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, broken):
                y = y.sin()
            loss = y.tanh().sum()
        offload.synchronize()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del y, loss
        assert_clean_step(offload)


class TestSpillDirectory:
    def test_is_removed_while_running(self, tmp_path, make_offload):
        """The nameless file goes on working, and growing."""
        directory = tmp_path / "spill"
        directory.mkdir()
        offload = make_offload(spill_dir=directory)
        with offload:
            loss = leaf(64, 64).exp().sum()
        offload.synchronize()
        shutil.rmtree(directory)
        loss.backward()
        del loss
        for _ in range(3):
            assert_clean_step(offload)
        assert not directory.exists()
        assert offload.stats.store_failures == 0

    def test_is_full_for_some_steps(self, make_offload):
        """A large step between small ones: what does not fit is kept and counted, and all of it is right."""
        offload = make_offload(max_spill_bytes=4 * BLOCK)

        def run(length, settle=True):
            return backward(lambda: ([leaf(64, 64)], lambda x: chain(x, length)), offload, settle=settle)

        def plain(length):
            return backward(lambda: ([leaf(64, 64)], lambda x: chain(x, length)))

        assert_same_bits(run(4), plain(4))
        assert offload.stats.store_failures == 0
        with pytest.warns(RuntimeWarning, match="max_spill_bytes"):
            assert_same_bits(run(20), plain(20))
        stats = offload.stats
        assert stats.store_failures == 20 - 4
        assert stats.bytes_written == (4 + 4) * BLOCK
        assert_nothing_left(offload)
        assert_same_bits(run(4), plain(4))
        assert offload.stats.bytes_written == (4 + 4 + 4) * BLOCK
        assert offload.stats.store_failures == stats.store_failures
        assert_nothing_left(offload)


class WatchedStore(SlowStore):
    """Notes, whenever a write begins, the most bytes that waited for the disk: packed, not kept, not yet written."""

    offload = None
    most_queued = 0

    def write(self, extent, buffer, offset=0):
        stats = self.offload.stats
        blocks = stats.tensors_packed - stats.blocks_kept - stats.blocks_offloaded - stats.blocks_forwarded
        self.most_queued = max(self.most_queued, blocks * BLOCK)
        super().write(extent, buffer, offset)


class TestSlowDisk:
    """A hundredth of an SSD's bandwidth, 20 MB/s: the writes take far longer than the arithmetic."""

    LENGTH = 100
    QUEUE = 5 * BLOCK

    @pytest.mark.parametrize("policy", ["keep", "wait"])
    def test_memory_is_bounded_and_nothing_hangs(self, make_offload, policy):
        store = WatchedStore(HostStore(), bandwidth=20e6)
        offload = store.offload = make_offload(
            store=store, on_full_queue=policy, store_queue_bytes=self.QUEUE, prefetch_bytes=self.QUEUE
        )

        def program():
            return [leaf(64, 64)], lambda x: chain(x, self.LENGTH)

        wanted = backward(program)
        for settle in (True, False):
            assert_same_bits(backward(program, offload, settle=settle), wanted)
            assert_nothing_left(offload)
        stats = offload.stats
        assert 3 * BLOCK <= store.most_queued <= self.QUEUE
        assert stats.bytes_read > 0
        if policy == "wait":
            assert stats.blocks_kept == 0
            assert stats.bytes_written >= (2 * self.LENGTH - self.QUEUE // BLOCK) * BLOCK
        else:
            assert stats.blocks_kept > 0

    def test_threads_wait_for_a_distant_disk_side_by_side(self, make_offload):
        """Each write and each read takes 0.2 s, whatever its size."""
        store = SlowStore(HostStore(), latency=0.2)
        offload = make_offload(store=store, io_threads=8, prefetch_bytes="1MiB")
        began = time.monotonic()
        assert_transparent(lambda: ([leaf(64, 64)], chain), offload)
        # One by one, the eight writes alone would take 1.6 s and the reads as long again.
        assert time.monotonic() - began < 1.6


class TestDeadThread:
    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, AssertionError, torch.OutOfMemoryError])
    def test_is_noticed_within_seconds(self, make_offload, kind):
        """One of two dies in the middle of the run."""

        class Deadly(WrapperStore):
            writes = 0

            def write(self, extent, buffer, offset=0):
                self.writes += 1
                if self.writes == 12:
                    raise kind("a bug in a store")
                super().write(extent, buffer, offset)

        offload = make_offload(store=Deadly(HostStore()), io_threads=2)
        began = time.monotonic()

        def train():
            for _ in range(100):
                with offload:
                    loss = chain(leaf(64, 64))
                offload.synchronize()
                loss.backward()

        with pytest.raises(
            SSDTrainError, match=r"an I/O thread of ssdtrain died.*a bug in a store"
        ) as caught:
            train()
        assert type(caught.value.__cause__) is kind
        with pytest.raises(SSDTrainError), offload:
            chain(leaf(64, 64))
        closing = threading.Thread(target=offload.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        assert time.monotonic() - began < 10

    def test_backward_does_not_wait_for_a_read_that_died(self, make_offload):
        class Deadly(WrapperStore):
            def read(self, extent, buffer, offset=0):
                if threading.current_thread() is not threading.main_thread():
                    raise SystemExit("a bug in a store")
                super().read(extent, buffer, offset)

        offload = make_offload(store=Deadly(HostStore()), io_threads=2)
        x = leaf(64, 64)
        with offload:
            loss = chain(x)
        offload.synchronize()
        began, error = time.monotonic(), None
        try:
            loss.backward()
        except SSDTrainError as caught:
            error = caught
        assert time.monotonic() - began < 5
        if error is None:  # each block was read by the main thread, or again by it
            assert_same_bits([loss, x.grad], backward(lambda: ([x.detach().requires_grad_()], chain)))
        else:
            assert "a bug in a store" in str(error)


# By what a process ends, with writes under way, and the exit code.
ENDINGS = {
    "signal.raise_signal(signal.SIGTERM)": -signal.SIGTERM,
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4)); signal.raise_signal(signal.SIGTERM)": 4,
    "signal.signal(signal.SIGINT, signal.default_int_handler); signal.raise_signal(signal.SIGINT)": (
        -signal.SIGINT
    ),
    "signal.signal(signal.SIGINT, signal.SIG_DFL); signal.raise_signal(signal.SIGINT)": -signal.SIGINT,
    "signal.raise_signal(signal.SIGHUP)": -signal.SIGHUP,
    "os.abort()": -signal.SIGABRT,
    "os._exit(5)": 5,
    "pass": 0,
    "loss.backward()": 0,
    "gc.disable(); cycle = [loss, offload]; cycle.append(cycle); del loss, offload, cycle": 0,
}

# Forks for each ending: importing torch once is enough. What hangs is ended by SIGALRM.
ENDING_PROGRAM = """
    import gc, os, resource, signal, sys
    import torch, ssdtrain
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for ending in sys.argv[2:]:
        child = os.fork()
        if child == 0:
            break
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, *os.listdir(sys.argv[1]))
    else:
        sys.exit()
    signal.alarm(20)
    offload = ssdtrain.OffloadActivations(spill_dir=sys.argv[1], min_tensor_bytes=1, min_free_bytes=0)
    with offload:
        loss = torch.randn(256, 1024, requires_grad=True)
        for _ in range(30):
            loss = loss.sin()
        loss = loss.sum()
    exec(ending)
"""


def test_no_way_of_ending_leaves_bytes_or_hangs(tmp_path):
    """A line for each: the exit code, and what is in the spill directory."""
    done = run_python(ENDING_PROGRAM, tmp_path, *ENDINGS, timeout=300)
    assert dict(zip(ENDINGS, done.stdout.split("\n"), strict=False)) == {
        ending: str(int(code)) for ending, code in ENDINGS.items()
    }
