"""How long blocks, threads, descriptors and files live: as long as they are needed, and no longer."""

import gc
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import ssdtrain
from ssdtrain import ActivationLostError, SSDTrainError

from .helpers import (
    assert_nothing_left,
    assert_same_bits,
    backward,
    eventually,
    io_threads,
    leaf,
    mlp,
    model_program,
    open_fds,
    run_python,
)

PROGRAM = model_program(mlp, 16, 64)

# What every program in a process of its own begins with.
SETUP = """
    import gc, os, signal, sys, threading, torch, ssdtrain
    torch.set_num_threads(1)
    offload = ssdtrain.OffloadActivations(spill_dir=sys.argv[1], min_tensor_bytes=1, min_free_bytes=0)
    def forward(x):
        with offload:
            for _ in range(10):
                x = x.sin()
            return x.sum()
    def gradient(x):
        x = x.detach().requires_grad_()
        y = x
        for _ in range(10):
            y = y.sin()
        y.sum().backward()
        return x.grad
    x = torch.randn(64, 64, requires_grad=True)
"""


def run(code, directory, **options):
    lines = SETUP + "\n".join("    " + line for line in code.strip("\n").splitlines())
    return run_python(lines, directory, **options)


class TestClose:
    def test_twice(self, offload):
        offload.close()
        offload.close()

    def test_stops_the_threads_and_closes_the_files(self, tmp_path):
        threads, fds = len(io_threads()), open_fds()
        offload = ssdtrain.OffloadActivations(spill_dir=tmp_path, min_free_bytes=0, min_tensor_bytes=1)
        assert len(io_threads()) > threads
        backward(PROGRAM, offload)
        offload.close()
        assert len(io_threads()) == threads
        assert open_fds() == fds

    def test_what_is_on_disk_is_lost(self, offload):
        with offload:
            loss = leaf(64, 64).exp().sum()
        offload.synchronize()
        offload.close()
        with pytest.raises(ActivationLostError, match="closed"):
            loss.backward()

    def test_what_was_kept_in_memory_is_not(self, make_offload, gated):
        offload = make_offload(store=gated, store_queue_bytes=1)
        x = leaf(64, 64)
        with offload:
            first = leaf(64, 64).exp()
            loss = x.sin().sum()
        gated.open("write")
        offload.close()
        loss.backward()
        assert_same_bits(x.grad, x.cos())
        del first

    def test_what_was_only_queued_is_not_lost(self, make_offload, gated):
        offload = make_offload(store=gated, io_threads=1)
        x = leaf(64, 64)
        with offload:
            first = leaf(64, 64).exp()
            gated.wait_for("write")
            loss = x.sin().sum()
        closing = threading.Thread(target=offload.close)
        closing.start()
        gated.open("write")
        closing.join(30)
        assert not closing.is_alive()
        loss.backward()
        assert_same_bits(x.grad, x.cos())
        del first

    def test_a_closed_one_cannot_be_entered(self, offload):
        offload.close()
        with pytest.raises(SSDTrainError, match="closed"), offload:
            pass
        leaf(64).exp()
        assert offload.stats.tensors_packed == 0

    @pytest.mark.parametrize("policy", ["keep", "wait"])
    def test_inside_a_forward_pass(self, make_offload, policy):
        """What is packed afterwards stays in memory, and nobody waits for it."""
        offload = make_offload(on_full_queue=policy, store_queue_bytes=1)
        x = leaf(64, 64)
        with offload:
            offload.close()
            loss = x.sin().sum() + x.exp().sum()
        waiting = threading.Thread(target=offload.synchronize, daemon=True)
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive()
        loss.backward()
        assert_same_bits(x.grad, x.cos() + x.exp())

    def test_statistics_can_still_be_read(self, offload):
        backward(PROGRAM, offload)
        offload.close()
        assert offload.stats.bytes_written > 0
        assert offload.stats.live_bytes_on_disk == 0

    def test_graphs_may_die_afterwards(self, offload):
        with offload:
            loss = leaf(64, 64).exp().sum()
        offload.close()
        del loss
        gc.collect()
        assert offload.stats.live_blocks == 0


class TestGarbageCollection:
    def make(self, tmp_path):
        return ssdtrain.OffloadActivations(spill_dir=tmp_path, min_free_bytes=0, min_tensor_bytes=1)

    def test_of_the_offloader_stops_threads_and_closes_files(self, tmp_path):
        threads, fds = len(io_threads()), open_fds()
        offload = self.make(tmp_path)
        backward(PROGRAM, offload)
        del offload
        gc.collect()
        assert eventually(lambda: len(io_threads()) == threads)
        assert eventually(lambda: open_fds() == fds)

    def test_needs_no_collector(self, tmp_path):
        """There is no reference cycle."""
        threads = len(io_threads())
        gc.collect()
        gc.disable()
        try:
            offload = self.make(tmp_path)
            with offload:
                loss = leaf(64, 64).exp().sum()
            loss.backward()
            del offload, loss
            assert eventually(lambda: len(io_threads()) == threads)
        finally:
            gc.enable()

    def test_a_graph_keeps_what_it_needs(self, tmp_path):
        offload = self.make(tmp_path)
        x = leaf(64, 64)
        with offload:
            loss = x.sin().sum()
        offload.synchronize()
        del offload
        gc.collect()
        loss.backward()
        assert_same_bits(x.grad, x.cos())

    def test_the_last_graph_ends_it(self, tmp_path):
        threads = len(io_threads())
        offload = self.make(tmp_path)
        with offload:
            loss = leaf(64, 64).sin().sum()
        del offload
        gc.collect()
        assert len(io_threads()) > threads
        del loss
        gc.collect()
        assert eventually(lambda: len(io_threads()) == threads)

    def test_the_model_is_not_kept(self, tmp_path):
        model = mlp()
        reference = weakref.ref(model)
        offload = ssdtrain.OffloadActivations(model, spill_dir=tmp_path, min_free_bytes=0)
        offload.close()
        del offload, model
        gc.collect()
        assert reference() is None

    def test_memory_of_a_spilled_block_is_freed(self, offload):
        with offload:
            y = leaf(64, 64) * 1
            loss = y.sin().sum()
            storage = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
            del y
            assert not storage.expired()
            offload.synchronize()
            assert storage.expired()
        loss.backward()


class TestManySteps:
    def test_nothing_grows(self, offload):
        def measure():
            gc.collect()
            offload.synchronize()
            stats = offload.stats
            return open_fds(), threading.active_count(), stats.live_blocks, stats.live_bytes_on_disk

        model, batch = mlp(), torch.randn(16, 64)
        sizes = set()
        for step in range(200):
            with offload:
                loss = model(batch).square().mean()
            if step % 3:
                loss.backward()
            del loss
            if step >= 20 and step % 20 == 0:
                sizes.add(measure())
        assert len(sizes) == 1
        assert next(iter(sizes))[2:] == (0, 0)

    def test_nor_with_many_offloaders(self, tmp_path):
        threads, fds = len(io_threads()), open_fds()
        for _ in range(20):
            with ssdtrain.OffloadActivations(spill_dir=tmp_path, min_free_bytes=0, min_tensor_bytes=1):
                loss = leaf(64, 64).exp().sum()
            loss.backward()
        del loss
        gc.collect()
        assert eventually(lambda: (len(io_threads()), open_fds()) == (threads, fds))


class TestProcesses:
    def test_exit_without_close(self, tmp_path):
        done = run("loss = forward(x); print('end')", tmp_path)
        assert done.stdout.strip() == "end"
        assert done.stderr == ""
        assert list(tmp_path.iterdir()) == []

    def test_exit_with_writes_under_way(self, tmp_path):
        code = """
losses = [forward(torch.randn(256, 1024, requires_grad=True)) for _ in range(4)]
sys.exit(3)
"""
        done = run(code, tmp_path, check=False)
        assert (done.returncode, done.stderr) == (3, "")
        assert list(tmp_path.iterdir()) == []

    def test_exit_by_an_exception(self, tmp_path):
        done = run("loss = forward(x)\nraise ZeroDivisionError", tmp_path, check=False)
        assert done.returncode == 1
        assert done.stderr.rstrip().endswith("ZeroDivisionError")
        assert "ssdtrain" not in done.stderr

    def test_a_kill_leaves_nothing_on_disk(self, tmp_path):
        code = """
losses = [forward(torch.randn(256, 1024, requires_grad=True)) for _ in range(4)]
os.kill(os.getpid(), signal.SIGKILL)
"""
        done = run(code, tmp_path, check=False)
        assert done.returncode == -signal.SIGKILL
        assert list(tmp_path.iterdir()) == []

    def test_an_interrupt_ends_the_program(self, tmp_path):
        code = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # not so by default in a job in the background
try:
    while True:
        forward(x).backward()
        signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    x.grad = None
    forward(x).backward()
    print("right" if torch.equal(x.grad, gradient(x)) else "wrong")
"""
        assert run(code, tmp_path).stdout.strip() == "right"

    @pytest.mark.parametrize("ending", ["os._exit(0)", "sys.exit(0)"])
    def test_a_fork_frees_nothing_of_the_parent(self, tmp_path, ending):
        code = f"""
loss = forward(x)
offload.synchronize()
child = os.fork()
if child == 0:
    del loss
    gc.collect()
    del offload, forward
    gc.collect()
    {ending}
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
loss.backward()
assert torch.equal(x.grad, gradient(x))
assert offload.stats.bytes_read > 0
"""
        run(code, tmp_path)

    def test_a_fork_asks_nothing_of_the_store(self, tmp_path):
        """The file is shared: what the child cut off would be gone for the parent."""
        code = """
from ssdtrain.storage import DirectStore
from ssdtrain.testing import OffloadOver, RecordingStore
import contextlib
store = RecordingStore(DirectStore(sys.argv[1]))
offload = OffloadOver(store, min_tensor_bytes=1)
loss = forward(x)
offload.synchronize()
child = os.fork()
if child == 0:
    before, live = len(store.operations), offload._session._engine._live_blocks
    del loss
    gc.collect()
    # Nor does it work off the handles that die here: a lock may be one that a thread of the parent had.
    assert offload._session._engine._live_blocks == live > 0
    with contextlib.suppress(ssdtrain.SSDTrainError):
        offload.stats
    os._exit(0 if len(store.operations) == before else 9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
loss.backward()
assert torch.equal(x.grad, gradient(x))
"""
        run(code, tmp_path)

    def test_a_fork_cannot_enter(self, tmp_path):
        code = """
child = os.fork()
if child == 0:
    try:
        forward(x)
    except ssdtrain.SSDTrainError as error:
        os._exit(7 if "fork" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
        run(code, tmp_path)

    @pytest.mark.parametrize("settle", ["offload.synchronize()", "pass"])
    def test_backward_in_a_fork_is_right_or_an_error_and_does_not_hang(self, tmp_path, settle):
        code = f"""
for _ in range(5):
    loss = forward(x)
    {settle}
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            grad, = torch.autograd.grad(loss, x)
        except ssdtrain.SSDTrainError as error:
            os._exit(0 if "fork" in str(error) else 8)
        os._exit(0 if torch.equal(grad, gradient(x)) else 9)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, code
    x.grad = None
    loss.backward()
    assert torch.equal(x.grad, gradient(x))
"""
        run(code, tmp_path)

    @pytest.mark.parametrize("call", ["offload.synchronize()", "offload.close()", "offload.stats"])
    def test_no_call_hangs_in_a_fork(self, tmp_path, call):
        code = f"""
from ssdtrain.storage import HostStore
from ssdtrain.testing import GatedStore, OffloadOver
store = GatedStore(HostStore(), hold=("write",))
offload = OffloadOver(store, min_tensor_bytes=1)
loss = forward(x)
store.wait_for("write")
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        {call}
    except ssdtrain.SSDTrainError:
        pass
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
store.open("write")
assert code == 0, code
loss.backward()
assert torch.equal(x.grad, gradient(x))
"""
        run(code, tmp_path)

    def test_workers_of_a_data_loader(self, tmp_path):
        code = """
from torch.utils.data import DataLoader
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        gc.collect()
        return torch.full((64, 64), float(index))
held = forward(x)
for batch in DataLoader(Data(), num_workers=2, multiprocessing_context="fork"):
    y = batch[0].requires_grad_()
    loss = forward(y)
    loss.backward()
    assert torch.equal(y.grad, gradient(y))
held.backward()
assert torch.equal(x.grad, gradient(x))
"""
        run(code, tmp_path, timeout=90)

    def test_a_spawned_child_of_a_training_process(self, tmp_path):
        loss_in_parent = "loss = forward(x); offload.synchronize()"
        code = f"""
{loss_in_parent}
import subprocess
subprocess.run([sys.executable, "-c", "pass"], check=True)
loss.backward()
assert torch.equal(x.grad, gradient(x))
"""
        run(code, tmp_path)

    def test_spill_files_are_not_inherited(self, tmp_path, offload):
        fds = subprocess.run(
            [
                sys.executable,
                "-c",
                "import os; print(*map(os.readlink, map('/proc/self/fd/{}'.format, range(3, 20))))",
            ],
            capture_output=True,
            text=True,
            check=False,
            close_fds=False,
        )
        assert str(tmp_path) not in fds.stdout


def test_nothing_is_left_after_a_step(offload):
    backward(PROGRAM, offload)
    assert_nothing_left(offload)
