"""Forward and backward passes, changes in place, faults and closing in any order, with I/O at the test's pace.

A state machine of hypothesis over whole offloaders. Every branch of a graph is computed three times: in plain torch,
with a copy of everything that is saved, and offloaded. Plain torch says what a gradient is, or that it cannot be had
any more; the copies say what it was.
"""

import errno
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain import ActivationLostError, InplaceModificationError, SSDTrainError
from ssdtrain.block import State
from ssdtrain.storage import HostStore
from ssdtrain.storage.base import PAGE
from ssdtrain.testing import Fault, FaultyStore, GatedStore, OffloadOver

from .helpers import assert_nothing_left, assert_same_bits, eventually
from .programs import Copying, forget_failed_backward

SECONDS = 30
COLUMNS = 8
ROWS = (4, 16, 64)  # of 32 bytes
ON_DISK = {State.WRITTEN, State.SPILLED, State.READING, State.RESTORED}
MOST_BRANCHES = 5
MOST_OFFLOADERS = 3

# Of what is saved: some share the block of their storage, and some are small enough for one of their own.
VIEWS = {
    "whole": lambda a: a,
    "transposed": lambda a: a.t(),
    "all but the first row": lambda a: a[1:],
    "every other column": lambda a: a[:, ::2],
    "one row": lambda a: a[1],
    "two rows": lambda a: a[-2:],
}
# Nothing that a graph has to keep, so that one whose backward has failed is no different from one that was used up.
CHANGES = {
    "whole": lambda a: a.add_(1),
    "a view": torch.no_grad()(lambda a: a[2:].neg_()),
    "an alias": lambda a: a.detach().neg_(),
}


views = st.sampled_from(list(VIEWS))


class SteeredStore(GatedStore):
    """What the I/O threads do waits for the test; what its own threads read does not."""

    def read(self, extent, buffer, offset=0):
        if threading.current_thread().name.startswith("ssdtrain-io"):
            super().read(extent, buffer, offset)
        else:
            self.inner.read(extent, buffer, offset)


class Once:
    """For `Fault.when`: the next time and not again."""

    def __init__(self):
        self.happened = False

    def __call__(self, _extent, _nbytes):
        first, self.happened = not self.happened, True
        return first


class Opened:
    """An offloader, and what the test sees of it."""

    def __init__(self, options):
        self.faulty = FaultyStore(HostStore())
        self.store = SteeredStore(self.faulty, timeout=SECONDS)
        self.offload = OffloadOver(self.store, min_tensor_bytes=1, **options)
        self.engine = self.offload._session._engine
        self.blocks = []  # all that ever were, weak
        self.faults = []
        self.entered = False
        self.closed = False
        self._let_pass_whoever_is_waited_for()
        self._remember_blocks()

    def _let_pass_whoever_is_waited_for(self):
        """For all that a call of the engine waits for is an I/O thread, and that may wait for the test."""
        wait = self.engine._done.wait

        def release_and_wait(timeout):
            self.store.release("read")
            self.store.release("write")
            return wait(timeout)

        self.engine._done.wait = release_and_wait

    def _remember_blocks(self):
        pack = self.offload.pack_hook

        def remembering(tensor):
            handle = pack(tensor)
            self.blocks.append(weakref.ref(handle.block))
            return handle

        self.offload.pack_hook = remembering

    def fail(self, operation, effect, code):
        """The next operation of a kind."""
        fault = Fault(operation=operation, effect=effect, errno=code, when=Once())
        self.faulty.faults = (fault,)
        self.faults.append(fault)

    def happened(self, *operations):
        return sum(fault.when.happened for fault in self.faults if fault.operation in operations)

    def in_state(self, *states):
        """Blocks; the engine's lock is held."""
        alive = {id(block): block for ref in self.blocks if (block := ref()) is not None}
        return [block for block in alive.values() if block.state in states]

    def count(self, *states):
        with self.engine._lock:
            return len(self.in_state(*states))

    def open_gates(self):
        self.store.open("read")
        self.store.open("write")

    def close_gates(self):
        self.store.hold("read")
        self.store.hold("write")


class Branch:
    """A leaf, a tensor made of it, and sums whose backward needs what was saved of that tensor."""

    def __init__(self, seed, rows):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, COLUMNS, generator=generator, requires_grad=True)
        self.a = self.x + 0
        self.sums = []

    def save(self, view):
        """The sine saves its input, and nothing else here saves anything."""
        self.sums.append(VIEWS[view](self.a).sin().sum())

    def gradient(self, at, retain_graph):
        return torch.autograd.grad(self.sums[at], self.x, retain_graph=retain_graph)

    def saved(self, at):
        return [self.sums[at].grad_fn.next_functions[0][0]._saved_self.detach().clone()]


def gradients(branches):
    """By one backward pass through all that there is."""
    total = sum(one for branch in branches for one in branch.sums)
    return torch.autograd.grad(total, [branch.x for branch in branches], retain_graph=True)


def outcome(function):
    """What a function returns, and the kind of error that it raises instead.

    Not the error: the traceback of its cause would hold graphs until the next garbage collection.
    """
    try:
        return function(), None
    except RuntimeError as error:
        kind = type(error)
    forget_failed_backward()
    return None, kind


class Saved(NamedTuple):
    """Where the offloaded branch's sum has what it needs."""

    block: weakref.ref
    owner: Opened


class Trio:
    """One branch, three times, in a thread of its choice: in which order gradients are added up depends on that."""

    def __init__(self, seed, rows, run):
        self.run = run
        self.plain, self.copied, self.offloaded = self.all = run(
            lambda: [Branch(seed, rows) for _ in range(3)]
        )
        self.saved = []

    def change(self, how):
        for branch in self.all:
            self.run(lambda branch=branch: CHANGES[how](branch.a))

    def drop(self, at):
        for each in (*(branch.sums for branch in self.all), self.saved):
            del each[at]


def here(function):
    """In the main thread."""
    return function()


class Interleavings(RuleBasedStateMachine):
    """What holds whatever the order: gradients, errors, who lives, and every budget."""

    def __init__(self):
        super().__init__()
        self.failures_before = sys.exception()

    @initialize(
        prefetch_bytes=st.sampled_from([0, 1, 600, 3000, 1 << 20]),
        store_queue_bytes=st.sampled_from([1, 600, 3000, 1 << 20]),
        on_full_queue=st.sampled_from(["keep", "wait"]),
        io_threads=st.integers(1, 2),
    )
    def open(self, **options):
        self.options = options
        self.other = ThreadPoolExecutor(1)
        self.opened = [Opened(options)]
        self.trios = []
        self.made = 0

    @property
    def now(self):
        return self.opened[-1]

    def there(self, function):
        """In the other thread."""
        result = self.other.submit(function).result(SECONDS)
        self.other.submit(int).result(SECONDS)  # by now it holds nothing of the function
        return result

    # Forward.

    def _enter(self):
        if self.now.closed and not self.now.entered:
            with pytest.raises(SSDTrainError, match="closed"):
                self.now.offload.__enter__()
            self.opened.append(Opened(self.options))
        if not self.now.entered:
            self.now.offload.__enter__()
            self.now.entered = True

    def _leave(self):
        if self.now.entered:
            self.now.offload.__exit__(None, None, None)
            self.now.entered = False

    @precondition(lambda self: self.now.entered)
    @rule()
    def leave(self):
        self._leave()

    @precondition(lambda self: len(self.trios) < MOST_BRANCHES)
    @rule(
        branches=st.lists(st.sampled_from(ROWS), min_size=1, max_size=4),
        view=views,
        in_another_thread=st.booleans(),
    )
    def save_of_new_branches(self, branches, view, in_another_thread):
        for rows in branches:
            self.made += 1
            self.trios.append(Trio(self.made, rows, self.there if in_another_thread else here))
            self._save(self.trios[-1], view)

    @precondition(lambda self: self.trios)
    @rule(at=st.integers(0, MOST_BRANCHES), view=views)
    def save_another_view(self, at, view):
        self._save(self._trio(at), view)

    @precondition(lambda self: self.trios)
    @rule(at=st.integers(0, MOST_BRANCHES), how=st.sampled_from(list(CHANGES)), view=views)
    def change_and_save_again(self, at, how, view):
        self._trio(at).change(how)
        self._save(self._trio(at), view)

    @precondition(lambda self: self.trios)
    @rule(at=st.integers(0, MOST_BRANCHES), how=st.sampled_from(list(CHANGES)))
    def change_in_place(self, at, how):
        self._trio(at).change(how)

    def _save(self, trio, view):
        if self.now.closed and trio.run is not here:
            self._leave()  # the other thread cannot enter it any more
        self._enter()
        before = len(self.now.blocks)
        # The pass goes on; only its hooks are not there.
        saved_tensors_hooks.__exit__(self.now.offload)
        trio.run(lambda: trio.plain.save(view))
        trio.run(lambda: self._save_copied(trio, view))
        saved_tensors_hooks.__enter__(self.now.offload)
        trio.run(lambda: self._save_offloaded(trio, view))
        (block,) = self.now.blocks[before:]
        trio.saved.append(Saved(block, self.now))

    @staticmethod
    def _save_copied(trio, view):
        with Copying():
            trio.copied.save(view)

    def _save_offloaded(self, trio, view):
        with self.now.offload if trio.run is not here else nullcontext():
            trio.offloaded.save(view)

    # Backward.

    @precondition(lambda self: self._sums())
    @rule(at=st.integers(0, 20), last=st.booleans(), settled=st.booleans(), in_another_thread=st.booleans())
    def backward(self, at, last, settled, in_another_thread):
        if settled:
            self.synchronize()
        trio, number = self._sum(at)
        needed = trio.saved[number : number + 1]
        self._compare(
            [trio],
            lambda branches: branches[0].gradient(number, not last),
            needed,
            self.there if in_another_thread else here,
        )
        if last:
            trio.drop(number)

    @precondition(lambda self: self._sums())
    @rule(settled=st.booleans(), in_another_thread=st.booleans())
    def backward_of_all(self, settled, in_another_thread):
        if settled:
            self.synchronize()
        trios = [trio for trio in self.trios if trio.saved]
        needed = [one for trio in trios for one in trio.saved]
        self._compare(trios, gradients, needed, self.there if in_another_thread else here)

    @precondition(lambda self: self._sums())
    @rule(at=st.integers(0, 20))
    def look_at_what_is_saved(self, at):
        trio, number = self._sum(at)
        needed = trio.saved[number : number + 1]
        self._compare([trio], lambda branches: branches[0].saved(number), needed, here)

    def _compare(self, trios, function, needed, run):
        """Ours is what plain torch gives; what was saved, where plain torch raises; or an error that has a cause."""
        plain, copied, offloaded = zip(*(trio.all for trio in trios), strict=True)
        torch_gives, torch_error = run(lambda: outcome(partial(function, plain)))
        was_saved, _ = run(lambda: outcome(partial(function, copied)))
        failed_reads = self._failed_reads()
        got, error = run(lambda: outcome(partial(function, offloaded)))
        if error is ActivationLostError:
            assert self._failed_reads() > failed_reads or any(one.owner.closed for one in needed)
        elif error is not None:
            assert error is InplaceModificationError
            assert torch_error is not None
        else:
            assert_same_bits(got, was_saved if torch_gives is None else torch_gives)

    def _failed_reads(self):
        return sum(one.happened("read") for one in self.opened)

    # The ends of graphs.

    @precondition(lambda self: self._sums())
    @rule(at=st.integers(0, 20))
    def drop_a_sum(self, at):
        trio, number = self._sum(at)
        trio.drop(number)

    @precondition(lambda self: self.trios)
    @rule(at=st.integers(0, MOST_BRANCHES))
    def drop_a_branch(self, at):
        self.trios.remove(self._trio(at))

    # The store.

    @precondition(lambda self: self._saved())
    @rule(number=st.integers(1, 3))
    def let_writes_pass(self, number):
        now, unwritten = self.now, (State.QUEUED, State.WRITING)
        before = now.count(*unwritten)
        number = min(number, before)
        now.store.release("write", number)
        now.engine.end_forward()  # wakes whoever is to write
        # Unless every thread is held up in a read.
        assert eventually(
            lambda: (
                now.count(*unwritten) <= before - number
                or now.count(State.READING) == self.options["io_threads"]
            )
        )

    @precondition(lambda self: self._saved())
    @rule(number=st.integers(1, 2), one_fails=st.booleans())
    def let_reads_ahead_pass(self, number, one_fails):
        now = self.now
        with now.engine._lock:
            waiting = now.in_state(State.READING)
        if waiting and one_fails:
            now.fail("read", "error", errno.EIO)
        now.store.release("read", min(number, len(waiting)))
        assert not waiting or eventually(lambda: any(block.state is not State.READING for block in waiting))

    @precondition(lambda self: self._saved())
    @rule(
        operation=st.sampled_from(["allocate", "write", "read"]),
        effect=st.sampled_from(["error", "short"]),
        code=st.sampled_from([errno.EIO, errno.ENOSPC, errno.EINTR]),
    )
    def fail_next(self, operation, effect, code):
        self.now.fail(operation, effect, code)

    @precondition(lambda self: self._saved())
    @rule()
    def synchronize(self):
        now = self.now
        now.open_gates()
        now.offload.synchronize()
        self.there(now.offload.synchronize)
        now.close_gates()
        assert now.count(State.QUEUED, State.WRITING, State.WRITTEN) == 0

    @precondition(lambda self: self._saved() and len(self.opened) < MOST_OFFLOADERS)
    @rule()
    def close(self):
        self.now.open_gates()
        self.now.offload.close()
        self.now.closed = True

    # What always holds.

    @invariant()
    def the_blocks_that_live_are_those_that_are_needed(self):
        for one in self.opened:
            stats = one.offload.stats  # buries the dead
            needed = {id(saved.block()) for saved in self._saved() if saved.owner is one}
            with one.engine._lock:
                living = one.in_state(*set(State) - {State.FREED})
                assert stats.live_blocks >= one.engine._live_blocks == len(living)
                assert {id(block) for block in living if block.handles} == needed
                # The others are freed when what an I/O thread does with them has ended.
                assert all(block.handles or block.state in {State.WRITING, State.READING} for block in living)

    @invariant()
    def the_store_queue_keeps_its_budget(self):
        limit = self.options["store_queue_bytes"]
        for one in self.opened:
            with one.engine._lock:
                unwritten, written = one.in_state(State.QUEUED, State.WRITING), one.in_state(State.WRITTEN)
                assert one.engine._queue._held_bytes == _bytes_of(unwritten + written)
                # A forward pass that waits does not wait for what another thread is yet to let go.
                held = unwritten + written if self.options["on_full_queue"] == "keep" else unwritten
                assert _bytes_of(held) <= limit or len(held) == 1

    @invariant()
    def reading_ahead_keeps_its_budget(self):
        limit = self.options["prefetch_bytes"]
        for one in self.opened:
            with one.engine._lock:
                ahead = list(one.engine._ahead._blocks)
                assert one.engine._ahead._bytes == _bytes_of(ahead)
                assert _bytes_of(ahead) <= limit or (len(ahead) == 1 and limit)
                reading_or_read = one.in_state(State.READING, State.RESTORED)
                assert all(block in reading_or_read or block in one.engine._ahead._to_read for block in ahead)
                held = [block for block in one.in_state(*State) if block.restored is not None]
                assert all(block.unread or block in ahead for block in held)

    @invariant()
    def the_store_holds_the_blocks_that_it_should(self):
        for one in self.opened:
            assert eventually(lambda one=one: self._disk_is_accounted_for(one))

    @staticmethod
    def _disk_is_accounted_for(one):
        stats = one.offload.stats
        with one.engine._lock:
            on_disk = [block for block in one.in_state(*State) if block.extent is not None]
            assert all(block.state in ON_DISK for block in on_disk)
            on_their_way = one.in_state(State.WRITING)
        surplus = (
            0 if one.closed else stats.live_bytes_on_disk - sum(block.extent.length for block in on_disk)
        )
        failures = one.happened("allocate", "write")
        return 0 <= surplus <= len(on_their_way) * PAGE and stats.store_failures == failures

    def teardown(self):
        if not hasattr(self, "opened"):
            return
        for one in self.opened:
            one.open_gates()
        self._leave()
        self.trios.clear()
        try:
            # After a failure its traceback holds whatever it likes.
            if sys.exception() is self.failures_before:
                self._assert_nothing_left()
        finally:
            for one in self.opened:
                one.offload.close()
            self.other.shutdown()

    def _assert_nothing_left(self):
        for one in self.opened:
            assert_nothing_left(one.offload)
            with one.engine._lock:
                assert one.in_state(*set(State) - {State.FREED}) == []
                assert one.engine._queue._held_bytes == one.engine._ahead._bytes == 0

    def _trio(self, at):
        return self.trios[at % len(self.trios)]

    def _sums(self):
        return [(trio, number) for trio in self.trios for number in range(len(trio.saved))]

    def _sum(self, at):
        sums = self._sums()
        return sums[at % len(sums)]

    def _saved(self):
        return [saved for trio in self.trios for saved in trio.saved]


def _bytes_of(blocks):
    return sum(block.span.nbytes for block in blocks)


TestInterleavings = pytest.mark.filterwarnings("ignore:ssdtrain keeps activations:RuntimeWarning")(
    Interleavings.TestCase
)
TestInterleavings.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    # The same examples every time: what fails here, fails again.
    derandomize=True,
    database=None,
    # Making a failing example shorter takes minutes, and a test that takes two is stopped as one that hangs.
    phases=set(Phase) - {Phase.shrink, Phase.explain},
)
