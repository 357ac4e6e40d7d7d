"""The I/O threads: small blocks share a wake-up, and none is forgotten."""

import threading

import pytest
import torch

import ssdtrain.workers
from ssdtrain.errors import SSDTrainError
from ssdtrain.storage import HostStore
from ssdtrain.workers import Workers

from .helpers import KIB, MIB, PatientStore, eventually, leaf

BATCH = 64 * KIB
BLOCK = 16 * KIB


@pytest.fixture(autouse=True)
def no_batches(monkeypatch):
    """Here small blocks wait for a batch."""
    monkeypatch.setattr(ssdtrain.workers, "WAKE_BATCH_BYTES", BATCH)


def save(tensor):
    """One block of `BLOCK` bytes."""
    assert tensor.nbytes == BLOCK
    return tensor.sin()


def writes(recording):
    return len(recording.of_kind("write"))


class TestBatches:
    def test_small_blocks_wait_for_the_end_of_the_forward_pass(self, make_offload, recording):
        offload = make_offload(store=recording)
        x = leaf(64, 64)
        with offload:
            outputs = [save(x * number) for number in range(3)]
            assert writes(recording) == 0
        assert eventually(lambda: writes(recording) == 3)
        del outputs

    def test_until_there_are_enough(self, make_offload, recording):
        offload = make_offload(store=recording)
        x = leaf(64, 64)
        with offload:
            outputs = [save(x * number) for number in range(BATCH // BLOCK)]
            assert eventually(lambda: writes(recording) == BATCH // BLOCK)
        del outputs

    def test_a_small_budget_is_batch_enough(self, make_offload, recording):
        offload = make_offload(store=recording, store_queue_bytes=BLOCK)
        x = leaf(64, 64)
        with offload:
            output = save(x * 2)
            assert eventually(lambda: writes(recording) == 1)
        del output

    def test_who_waits_does_not_wait_for_a_batch(self, make_offload, recording):
        offload = make_offload(store=recording)
        x = leaf(64, 64)
        with offload:
            output = save(x * 2)
            offload.synchronize()
            assert writes(recording) == 1
        del output

    def test_nor_does_one_who_waits_for_room(self, make_offload, recording):
        offload = make_offload(store=recording, store_queue_bytes=BLOCK, on_full_queue="wait")
        x = leaf(64, 64)
        with offload:
            outputs = [save(x * number) for number in range(8)]
        offload.synchronize()
        assert writes(recording) == 8
        assert offload.stats.blocks_kept == 0
        del outputs

    def test_the_last_block_of_a_backward_pass_is_read_ahead(self, make_offload):
        # The window holds 8 blocks, so 2 are a batch; of 10, the first is read by backward and the last is alone.
        patient = PatientStore(HostStore(), ahead=8)
        offload = make_offload(store=patient, prefetch_bytes=8 * BLOCK)
        x = leaf(64, 64)
        with offload:
            y = save(x)
            y.register_hook(lambda _: None if eventually(lambda: patient.read_ahead == 9) else 1 / 0)
            for _ in range(9):
                y = save(y)
        offload.synchronize()
        y.sum().backward()
        assert patient.read_by_user == 1

    def test_a_small_block_before_one_that_does_not_fit_is_read_ahead(self, make_offload):
        class Saves(torch.autograd.Function):
            @staticmethod
            def forward(ctx, carry, block, wait):
                ctx.save_for_backward(block)
                ctx.wait = wait
                return carry.clone()

            @staticmethod
            def backward(ctx, grad):
                assert len(ctx.saved_tensors) == 1
                assert ctx.wait()
                return grad, None, None

        store = PatientStore(HostStore(), ahead=1)
        offload = make_offload(store=store, prefetch_bytes=8 * BLOCK)
        small, large = BLOCK // 4, 15 * BLOCK // 8  # elements: one block, and seven and a half
        carry = leaf(1)
        with offload:
            # Backward asks for the last one first, and reads it. The third, once it was read ahead, leaves room
            # for the second, which is half a batch, but not for the first as well.
            for elements, ahead in ((large, 3), (small, 3), (large, 2), (large, 1)):
                carry = Saves.apply(
                    carry,
                    torch.randn(elements),
                    lambda ahead=ahead: eventually(lambda: store.read_ahead >= ahead),
                )
        offload.synchronize()
        carry.backward()
        assert (store.read_ahead, store.read_by_user) == (3, 1)


class TestWorkers:
    def make(self, jobs, count=2, **options):
        """Workers over a list of jobs; returns them and the event that a crash sets."""
        crashed = threading.Event()
        options = {"smallest_budget": MIB} | options

        def next_job():
            return jobs.pop() if jobs else None

        return Workers(count, next_job=next_job, on_crash=crashed.set, **options), crashed

    def test_sleep_until_they_are_woken(self):
        jobs, done = [], threading.Event()
        workers, _ = self.make(jobs)
        jobs.append(done.set)
        workers.wake()  # nobody said that there is more to do
        workers.wake_one()
        assert done.wait(30)
        workers.stop()

    def test_as_many_wake_as_there_is_batch_for(self):
        both = threading.Barrier(3, timeout=30)
        jobs = []
        workers, _ = self.make(jobs)
        jobs += [both.wait, both.wait]
        assert not workers.queued(BATCH - 1)
        assert workers.queued(BATCH + 1)
        workers.wake()
        both.wait()  # two jobs at once
        workers.stop()

    def test_a_job_that_raises_is_reported(self):
        def fail():
            raise ValueError("broken")

        jobs = [fail]
        workers, crashed = self.make(jobs, count=1)
        workers.wake_one()
        assert crashed.wait(30)
        with pytest.raises(SSDTrainError, match="broken"):
            workers.check()
        workers.stop()

    def test_stop_lets_the_job_end_and_takes_no_more(self):
        begun, go_on, ended = threading.Event(), threading.Event(), []

        def job():
            begun.set()
            assert go_on.wait(30)
            ended.append(True)

        jobs = [lambda: ended.append("never"), job]
        workers, _ = self.make(jobs, count=1)
        workers.wake_one()
        assert begun.wait(30)
        stopping = threading.Thread(target=workers.stop)
        stopping.start()
        go_on.set()
        stopping.join()
        assert ended[0] is True
        workers.check()  # they ended because they were told to
        workers.stop()

    def test_when_threads_run_out_those_begun_end(self, monkeypatch):
        before = threading.active_count()
        start = threading.Thread.start
        started = []

        def only_one(thread):
            if started:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", only_one)
        with pytest.raises(RuntimeError, match="can't start"):
            self.make([])
        assert threading.active_count() == before


def test_blocks_of_a_batch_come_back_whole(make_offload):
    offload = make_offload()
    x = leaf(64, 64)
    (wanted,) = torch.autograd.grad(x.sin().cos().tanh().sum(), x)
    with offload:
        y = x.sin().cos().tanh().sum()
    (got,) = torch.autograd.grad(y, x)
    assert torch.equal(got, wanted)
