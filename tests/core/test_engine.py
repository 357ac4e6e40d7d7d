"""Writing behind the forward pass and reading ahead of backward: order, budgets, and what a wrong guess costs."""

import random
import threading

import pytest
import torch

from ssdtrain.storage import HostStore
from ssdtrain.testing import GatedStore, RecordingStore, SlowStore

from .helpers import (
    KIB,
    MIB,
    PatientStore,
    assert_nothing_left,
    assert_same_bits,
    assert_transparent,
    backward,
    eventually,
    leaf,
    mlp,
    model_program,
)

BLOCK = 16 * KIB
CHAIN = 8
PROGRAM = model_program(mlp, 16, 64)


def chain(x, length=CHAIN):
    """Every link saves one block of 16 KiB, that nothing else saves."""
    for _ in range(length):
        x = x.sin()
    return x.sum()


def chain_program(length=CHAIN):
    return lambda: ([leaf(64, 64)], lambda x: chain(x, length))


class TestForwarding:
    @pytest.fixture
    def recorded(self):
        return RecordingStore(HostStore())

    @pytest.fixture
    def gated(self, recorded):
        return GatedStore(recorded, hold=("write",), timeout=30)

    def test_backward_takes_what_is_not_written_yet_and_cancels_the_write(
        self, make_offload, gated, recorded
    ):
        offload = make_offload(store=gated, io_threads=1)
        wanted = backward(chain_program())
        got = backward(chain_program(), offload, settle=False)
        gated.open("write")
        offload.synchronize()
        assert_same_bits(got, wanted)
        assert len(recorded.of_kind("write")) <= 1
        assert recorded.of_kind("read") == []
        assert offload.stats.blocks_forwarded == CHAIN

    def test_what_is_being_written_is_taken_from_memory(self, make_offload, gated):
        offload = make_offload(store=gated)
        x = leaf(64, 64)
        with offload:
            loss = x.sin().sum()
        gated.wait_for("write")
        loss.backward()
        assert_same_bits(x.grad, x.cos())
        assert offload.stats.blocks_forwarded == 1
        assert offload.stats.bytes_read == 0

    def test_the_memory_is_that_of_the_saved_tensor(self, make_offload, gated):
        offload = make_offload(store=gated)
        x = leaf(64, 64)
        with offload:
            y = x.sin()
        gated.wait_for("write")
        assert y.grad_fn._saved_self.data_ptr() == x.data_ptr()

    def test_a_forwarded_block_can_be_asked_for_again(self, make_offload, gated):
        offload = make_offload(store=gated)
        x = leaf(64, 64)
        with offload:
            loss = chain(x)
        gated.wait_for("write")
        loss.backward(retain_graph=True)
        first, x.grad = x.grad, None
        gated.open("write")
        offload.synchronize()
        loss.backward()
        assert_same_bits(x.grad, first)

    def test_half_written(self, make_offload, gated):
        """The first half is on disk and read, the second is taken from memory."""
        offload = make_offload(store=gated, io_threads=1)
        wanted = backward(chain_program())
        torch.manual_seed(0)
        x = leaf(64, 64)
        gated.release("write", CHAIN // 2)
        with offload:
            loss = chain(x)
        gated.wait_for("write")
        assert eventually(lambda: offload.stats.blocks_offloaded == CHAIN // 2)
        loss.backward()
        assert_same_bits([loss, x.grad], wanted)
        assert offload.stats.blocks_forwarded >= CHAIN // 2

    @pytest.mark.parametrize("prefetch_bytes", [0, "1MiB"])
    def test_a_read_waits_for_its_own_write(self, make_offload, prefetch_bytes):
        """Slow writes, and backward at once, with reading ahead and without."""
        store = SlowStore(HostStore(), latency=0.002)
        offload = make_offload(store=store, prefetch_bytes=prefetch_bytes)
        for _ in range(3):
            assert_same_bits(backward(PROGRAM, offload, settle=False), backward(PROGRAM))
            assert_same_bits(backward(PROGRAM, offload, settle=True), backward(PROGRAM))


class TestStoreQueue:
    def test_when_full_new_blocks_are_kept(self, make_offload, gated):
        offload = make_offload(store=gated, store_queue_bytes=2 * BLOCK)
        x = leaf(64, 64)
        with offload:
            loss = chain(x)
        assert offload.stats.blocks_kept == CHAIN - 2
        gated.open("write")
        offload.synchronize()
        assert offload.stats.bytes_written == 2 * BLOCK
        loss.backward()
        wanted = backward(lambda: ([x.detach().requires_grad_()], chain))
        assert_same_bits(x.grad, wanted[1])

    def test_room_comes_back(self, make_offload, gated):
        offload = make_offload(store=gated, store_queue_bytes=2 * BLOCK)
        with offload:
            first = chain(leaf(64, 64))
        gated.open("write")
        offload.synchronize()
        with offload:
            second = leaf(64, 64).sin().exp()
        offload.synchronize()
        assert offload.stats.bytes_written == 4 * BLOCK
        del first, second

    def test_room_of_dropped_graphs_comes_back(self, make_offload, gated):
        offload = make_offload(store=gated, store_queue_bytes=2 * BLOCK)
        for _ in range(3):
            with offload:
                loss = chain(leaf(64, 64))
            del loss
        gated.open("write")
        assert_nothing_left(offload)
        assert_transparent(chain_program(2), offload)

    def test_when_told_to_wait_forward_waits_and_queued_bytes_are_bounded(self, make_offload):
        recording = RecordingStore(SlowStore(HostStore(), latency=0.001))
        offload = make_offload(store=recording, store_queue_bytes=2 * BLOCK, on_full_queue="wait")
        y, most = leaf(64, 64), 0
        with offload:
            for count in range(1, 30):
                y = y.sin()
                most = max(most, count * BLOCK - sum(write.nbytes for write in recording.of_kind("write")))
        assert most <= 2 * BLOCK
        offload.synchronize()
        assert offload.stats.bytes_written == 29 * BLOCK
        assert offload.stats.blocks_kept == 0
        assert offload.stats.stall_seconds > 0
        y.sum().backward()

    @pytest.mark.parametrize("policy", ["keep", "wait"])
    @pytest.mark.parametrize("budget", [1, BLOCK - 1, BLOCK, 3 * BLOCK])
    def test_gradients_do_not_depend_on_the_budget(self, make_offload, policy, budget):
        offload = make_offload(store_queue_bytes=budget, prefetch_bytes=budget, on_full_queue=policy)
        for settle in (True, False):
            assert_transparent(PROGRAM, offload, settle=settle)
        assert_nothing_left(offload)

    def test_a_block_larger_than_every_budget(self, make_offload):
        offload = make_offload(store_queue_bytes=KIB, prefetch_bytes=KIB)
        assert_transparent(lambda: ([leaf(1024, 1024)], lambda x: x.sin().sum()), offload)
        assert offload.stats.bytes_written == 4 * MIB

    def test_waiting_with_nothing_queued(self, offload):
        offload.synchronize()
        offload.synchronize()

    def test_waiting_for_room_in_several_threads(self, make_offload):
        offload = make_offload(store_queue_bytes=1, on_full_queue="wait")
        wanted, results = backward(chain_program()), []

        def work():
            x = wanted_input.detach().requires_grad_()
            with offload:
                loss = chain(x)
            loss.backward()
            results.append(x.grad)

        torch.manual_seed(0)
        wanted_input = leaf(64, 64)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert_same_bits(results, [wanted[1]] * 4)


class TestReadingAhead:
    def test_none(self, make_offload):
        store = PatientStore(HostStore())
        offload = make_offload(store=store, prefetch_bytes=0)
        assert_transparent(chain_program(), offload)
        stats = offload.stats
        assert (stats.prefetch_hits, stats.prefetch_misses, store.read_ahead) == (0, CHAIN, 0)

    def test_all_but_the_first_block_are_read_ahead(self, make_offload):
        offload = make_offload(store=PatientStore(HostStore(), ahead=CHAIN - 1))
        assert_transparent(chain_program(), offload)
        stats = offload.stats
        assert (stats.prefetch_hits, stats.prefetch_misses) == (CHAIN - 1, 1)
        assert stats.bytes_read == CHAIN * BLOCK

    def test_no_more_than_the_budget_is_read_ahead(self, make_offload):
        store = PatientStore(HostStore(), ahead=2)
        offload = make_offload(store=store, prefetch_bytes=2 * BLOCK)
        with offload:
            y = leaf(64, 64)
            for _ in range(CHAIN):
                y = y.sin()
        offload.synchronize()

        class Ask(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                y.grad_fn._saved_self  # noqa: B018 - asks once; nothing is computed before the rest was read ahead
                assert store.read_ahead <= 2
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            Ask.apply(y).sum().backward()

    def test_the_order_of_the_last_backward_is_used(self, make_offload):
        """Losses are taken in an order that is not the reverse of packing."""
        store = PatientStore(HostStore())
        offload = make_offload(store=store, prefetch_bytes=2 * BLOCK, io_threads=1)

        def step():
            x = leaf(64, 64)
            with offload:
                parts = [(x * factor).sin().sum() for factor in (1, 2, 3, 4)]
            offload.synchronize()
            order = []
            for at in (1, 3, 0, 2):
                parts[at].backward()
                order.append(store.read_by_user)
            return x.grad

        first = step()
        assert first is not None
        store.ahead = 2 + store.read_ahead
        hits = offload.stats.prefetch_hits
        step()
        assert offload.stats.prefetch_hits >= hits + 2

    def test_wrong_guesses_cost_time_only(self, make_offload):
        """Another order in every step."""
        offload = make_offload(prefetch_bytes=2 * BLOCK)
        shuffled = random.Random(0)
        weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        for _ in range(10):
            order = shuffled.sample(range(6), 6)

            def run(context, order=order):
                torch.manual_seed(0)
                x = leaf(64, 64)
                with context or torch.enable_grad():
                    parts = [(x * weight).sin().exp().sum() for weight in weights]
                if context:
                    context.synchronize()
                return [torch.autograd.grad(parts[at], x)[0] for at in order]

            assert_same_bits(run(offload), run(None))
        assert_nothing_left(offload)

    def test_wrong_guesses_leave_the_budget_as_it_was(self, make_offload):
        store = PatientStore(HostStore())
        offload = make_offload(store=store, prefetch_bytes=(CHAIN - 1) * BLOCK)
        for _ in range(20):
            x = leaf(64, 64)
            with offload:
                parts = [(x * weight).sin().exp().sum() for weight in (1, 2, 3)]
            offload.synchronize()
            parts[0].backward()
            del parts
        assert_nothing_left(offload)
        store.ahead = store.read_ahead + CHAIN - 1
        before = offload.stats
        assert_transparent(chain_program(), offload)
        assert offload.stats.prefetch_misses - before.prefetch_misses == 1
        assert offload.stats.prefetch_hits - before.prefetch_hits == CHAIN - 1

    def test_abandoned_guesses_do_not_keep_others_from_being_read_ahead(self, make_offload):
        """A graph of which backward reached a part only lives on."""
        store = PatientStore(HostStore(), ahead=CHAIN - 1)
        offload = make_offload(store=store, prefetch_bytes=(CHAIN - 1) * BLOCK)
        x = leaf(64, 64)
        with offload:
            links = [x]
            for _ in range(CHAIN):
                links.append(links[-1].sin())
        offload.synchronize()
        torch.autograd.grad(links[-1].sum(), links[-2])
        store.ahead += CHAIN - 1
        before = offload.stats
        assert_transparent(chain_program(), offload)
        assert offload.stats.prefetch_hits - before.prefetch_hits == CHAIN - 1
        del links

    def test_the_budget_is_whole_after_passes_that_two_backwards_walk(self, make_offload):
        store = PatientStore(HostStore())
        offload = make_offload(store=store, prefetch_bytes=(CHAIN - 1) * BLOCK)
        for _ in range(10):
            with offload:
                one, other = chain(leaf(64, 64)), chain(leaf(64, 64))
            offload.synchronize()
            one.backward()
            other.backward()
            del one, other
        assert_nothing_left(offload)
        store.ahead = store.read_ahead + CHAIN - 1
        assert_transparent(chain_program(), offload)

    def test_a_graph_dropped_while_it_is_read_ahead(self, make_offload):
        class GatedForWorkers(GatedStore):
            def read(self, extent, buffer, offset=0):
                by_worker = threading.current_thread().name.startswith("ssdtrain-io")
                (super() if by_worker else self.inner).read(extent, buffer, offset)

        store = GatedForWorkers(HostStore(), hold=("read",), timeout=30)
        offload = make_offload(store=store)
        with offload:
            links = [leaf(64, 64)]
            for _ in range(CHAIN):
                links.append(links[-1].sin())
        offload.synchronize()
        torch.autograd.grad(links[-1].sum(), links[-2])
        store.wait_for("read", 2)
        del links
        store.open("read")
        assert_nothing_left(offload)

    def test_gradients_of_a_part_of_the_graph(self, offload):
        def run(context):
            torch.manual_seed(0)
            x = leaf(64, 64)
            with context or torch.enable_grad():
                links = [x]
                for _ in range(CHAIN):
                    links.append(links[-1].sin())
            if context:
                context.synchronize()
            grads = [torch.autograd.grad(links[-1].sum(), link, retain_graph=True)[0] for link in links[::-2]]
            links[3].sum().backward()
            return [*grads, x.grad]

        assert_same_bits(run(offload), run(None))
        assert_nothing_left(offload)

    def test_steps_of_changing_shape(self, offload):
        for size in (16, 64, 32, 64, 16, 48):
            assert_transparent(model_program(lambda size=size: mlp(depth=size // 16), size, 64), offload)
        assert_nothing_left(offload)

    def test_a_read_that_is_slower_than_backward(self, make_offload):
        offload = make_offload(store=SlowStore(HostStore(), latency=0.002), prefetch_bytes=4 * BLOCK)
        for _ in range(2):
            assert_transparent(PROGRAM, offload)
        assert offload.stats.stall_seconds > 0


class TestStatistics:
    def test_what_a_simple_step_counts(self, make_offload):
        offload = make_offload(backend="host", prefetch_bytes=0)
        with offload:
            loss = chain(leaf(64, 64))
        offload.synchronize()
        stats = offload.stats
        assert (stats.tensors_packed, stats.tensors_exempt, stats.blocks_deduplicated) == (CHAIN, 0, 0)
        assert (stats.blocks_offloaded, stats.bytes_written) == (CHAIN, CHAIN * BLOCK)
        assert (stats.live_blocks, stats.live_bytes_on_disk) == (CHAIN, CHAIN * BLOCK)
        assert stats.backend == "host"
        loss.backward()
        stats = offload.stats
        assert (stats.bytes_read, stats.prefetch_misses) == (CHAIN * BLOCK, CHAIN)
        assert stats.stall_seconds > 0
        assert (stats.blocks_forwarded, stats.blocks_kept, stats.store_failures) == (0, 0, 0)
        assert_nothing_left(offload)

    def test_can_be_read_at_any_time_from_any_thread(self, offload):
        stop, seen = threading.Event(), []

        def watch():
            while not stop.is_set():
                seen.append(offload.stats)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(5):
            backward(PROGRAM, offload)
        stop.set()
        watcher.join(30)
        assert all(stats.live_blocks >= 0 and stats.live_bytes_on_disk >= 0 for stats in seen)
        written = [stats.bytes_written for stats in seen]
        assert written == sorted(written)
