"""A disk that fails: the run goes on, or ends with an error that says what happened. Nothing hangs."""

import errno
import threading
import warnings

import pytest
import torch

from ssdtrain import ActivationLostError, SSDTrainError, StoreError
from ssdtrain.storage import HostStore, VerifyingStore
from ssdtrain.testing import Fault, FaultyStore, GatedStore, InjectedDeathError, WrapperStore

from .helpers import (
    assert_nothing_left,
    assert_same_bits,
    assert_transparent,
    backward,
    error_of,
    leaf,
    mlp,
    model_program,
)

PROGRAM = model_program(mlp, 16, 64)
KEEPS = "ssdtrain keeps activations"


class TestFailedStores:
    @pytest.mark.parametrize("operation", ["allocate", "write"])
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
    @pytest.mark.parametrize("settle", [True, False])
    def test_gradients_are_right_and_failures_counted(self, make_offload, faulty, operation, code, settle):
        offload = make_offload(store=faulty)
        faulty.faults = (Fault(operation=operation, errno=code),)
        with pytest.warns(RuntimeWarning, match=KEEPS):
            got = backward(PROGRAM, offload)
        assert_same_bits(got, backward(PROGRAM))
        stats = offload.stats
        assert stats.store_failures == faulty.injected > 0
        assert stats.bytes_written == 0

    def test_some_writes_fail_half_way(self, make_offload, faulty):
        offload = make_offload(store=faulty)
        faulty.faults = (Fault(operation="write", effect="short", probability=0.5),)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(5):
                assert_same_bits(backward(PROGRAM, offload), backward(PROGRAM))
        assert faulty.injected > 0
        assert_nothing_left(offload)

    def test_warns_once(self, make_offload, faulty):
        offload = make_offload(store=faulty)
        faulty.faults = (Fault(operation="write", errno=errno.ENOSPC),)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                backward(PROGRAM, offload)
            offload.synchronize()
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == 1
        assert "No space left" in texts[0]

    def test_a_full_spill_directory(self, make_offload):
        """By the quota."""
        offload = make_offload(max_spill_bytes="16KiB")
        with pytest.warns(RuntimeWarning, match="max_spill_bytes"):
            got = backward(PROGRAM, offload)
        assert_same_bits(got, backward(PROGRAM))
        assert 0 < offload.stats.bytes_written <= 16 << 10

    def test_recovers_when_the_disk_does(self, make_offload, faulty):
        offload = make_offload(store=faulty)
        faulty.faults = (Fault(operation="allocate", errno=errno.ENOSPC),)
        with pytest.warns(RuntimeWarning, match=KEEPS):
            backward(PROGRAM, offload)
        faulty.faults = ()
        assert_transparent(PROGRAM, offload)

    def test_warnings_as_errors_do_not_stop_the_workers(self, make_offload, faulty):
        offload = make_offload(store=faulty)
        faulty.faults = (Fault(operation="write", index=0),)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warning = error_of(RuntimeWarning, lambda: backward(PROGRAM, offload))
        assert warning is None or KEEPS in str(warning)
        assert_transparent(PROGRAM, offload)

    def test_raise_gives_the_error_to_the_next_pack(self, make_offload, faulty):
        gated = GatedStore(faulty, hold=("write",), timeout=30)
        offload = make_offload(store=gated, on_store_error="raise")
        faulty.faults = (Fault(operation="write", index=0, errno=errno.ENOSPC),)

        def forward():
            with offload:
                y = leaf(64, 64).exp()
                gated.open("write")
                for _ in range(100_000):
                    y = y.sin()

        with pytest.raises(StoreError, match="injected") as caught:
            forward()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename

    def test_raise_gives_the_error_to_synchronize(self, make_offload, faulty):
        offload = make_offload(store=faulty, on_store_error="raise")
        faulty.faults = (Fault(operation="write", index=0),)
        x = leaf(64, 64)
        with offload:
            y = x.exp()
        with pytest.raises(StoreError, match="injected"):
            offload.synchronize()
        offload.synchronize()
        y.sum().backward()
        assert_same_bits(x.grad, y)

    def test_a_full_queue_that_waits_does_not_wait_for_failed_writes(self, make_offload, faulty):
        offload = make_offload(store=faulty, on_full_queue="wait", store_queue_bytes=1)
        faulty.faults = (Fault(operation="write"),)
        with pytest.warns(RuntimeWarning, match=KEEPS):
            got = backward(PROGRAM, offload)
        assert_same_bits(got, backward(PROGRAM))


class TestFailedLoads:
    @pytest.mark.parametrize("prefetch_bytes", [0, "1MiB"])
    def test_backward_says_what_is_lost_and_why(self, make_offload, faulty, prefetch_bytes):
        offload = make_offload(store=faulty, prefetch_bytes=prefetch_bytes)
        with offload:
            loss = leaf(64, 64).exp().sum()
        offload.synchronize()
        faulty.faults = (Fault(operation="read", errno=errno.EIO),)
        with pytest.raises(ActivationLostError, match="host store, offset 0, 16384 bytes") as caught:
            loss.backward()
        assert "Input/output error" in str(caught.value)
        assert isinstance(caught.value.__cause__, StoreError)
        assert caught.value.__cause__.errno == errno.EIO

    def test_the_error_names_the_spill_directory(self, make_offload, tmp_path):
        stores = []

        class Failing(WrapperStore):
            def read(self, extent, buffer, offset=0):
                raise StoreError(errno.EIO, "cannot read", self.location(extent))

        from ssdtrain.storage import DirectStore

        stores.append(Failing(DirectStore(tmp_path)))
        offload = make_offload(store=stores[0])
        with offload:
            loss = leaf(64, 64).exp().sum()
        offload.synchronize()
        with pytest.raises(ActivationLostError) as caught:
            loss.backward()
        assert str(tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_the_next_step_is_clean(self, make_offload, faulty):
        offload = make_offload(store=faulty)
        torch.manual_seed(0)
        leaves, forward = PROGRAM()
        with offload:
            loss = forward(*leaves)
        offload.synchronize()
        faulty.faults = (Fault(operation="read"),)
        with pytest.raises(ActivationLostError):
            loss.backward()
        faulty.faults = ()
        del loss, leaves, forward
        assert_nothing_left(offload)
        assert_transparent(PROGRAM, offload)

    def test_a_read_that_succeeds_later_is_right(self, make_offload, faulty):
        """The block is still on disk: a second backward may find it."""
        offload = make_offload(store=faulty)
        x = leaf(64, 64)
        with offload:
            y = x.exp()
        offload.synchronize()
        faulty.faults = (Fault(operation="read", index=0),)
        with pytest.raises(ActivationLostError):
            y.grad_fn._saved_result  # noqa: B018
        assert_same_bits(y.grad_fn._saved_result, y)

    def test_a_failed_read_ahead_is_tried_again(self, make_offload, faulty):
        """Only when backward itself asks in vain is the block lost."""
        offload = make_offload(store=faulty)
        torch.manual_seed(0)
        leaves, forward = PROGRAM()
        with offload:
            loss = forward(*leaves)
        offload.synchronize()
        main = threading.get_ident()
        faulty.faults = (Fault(operation="read", when=lambda *_: threading.get_ident() != main),)
        loss.backward()
        assert_same_bits([loss, *(one.grad for one in leaves)], backward(PROGRAM))

    def test_half_a_read_is_not_used(self, make_offload, faulty):
        offload = make_offload(store=faulty)
        with offload:
            loss = leaf(64, 64).exp().sum()
        offload.synchronize()
        faulty.faults = (Fault(operation="read", effect="short"),)
        with pytest.raises(ActivationLostError):
            loss.backward()


class TestVerify:
    @pytest.mark.parametrize("operation", ["read", "write"])
    def test_a_flipped_bit_is_found(self, make_offload, operation):
        pytest.importorskip("xxhash")
        faulty = FaultyStore(HostStore(), Fault(operation=operation, effect="flip"))
        offload = make_offload(store=VerifyingStore(faulty))
        with offload:
            loss = leaf(64, 64).exp().sum()
        offload.synchronize()
        with pytest.raises(ActivationLostError, match="checksum"):
            loss.backward()

    def test_is_an_option(self, make_offload):
        pytest.importorskip("xxhash")
        assert_transparent(PROGRAM, make_offload(verify=True))


class TestDeadWorkers:
    """Whatever ends an I/O thread is raised where it is waited for."""

    class Broken(WrapperStore):
        def write(self, extent, buffer, offset=0):
            raise ZeroDivisionError("a bug in a store")

    @pytest.fixture
    def offload(self, make_offload):
        return make_offload(store=self.Broken(HostStore()), io_threads=1)

    def test_synchronize_raises(self, offload):
        with offload:
            y = leaf(64, 64).exp()
        with pytest.raises(SSDTrainError, match="a bug in a store") as caught:
            offload.synchronize()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        del y

    def test_pack_raises_and_backward_takes_what_is_in_memory(self, offload):
        with offload:
            loss = leaf(64, 64).exp().sum()
        with pytest.raises(SSDTrainError):
            offload.synchronize()
        with pytest.raises(SSDTrainError, match="a bug in a store"), offload:
            leaf(64, 64).exp()
        loss.backward()  # needs no thread: the bytes are still in memory

    def test_waiting_for_room_raises(self, make_offload):
        offload = make_offload(
            store=self.Broken(HostStore()), io_threads=1, on_full_queue="wait", store_queue_bytes=1
        )

        def forward():
            with offload:
                y = leaf(64, 64)
                for _ in range(10):
                    y = y.exp()

        with pytest.raises(SSDTrainError, match="a bug in a store"):
            forward()

    @pytest.mark.parametrize("operation", ["allocate", "write"])
    def test_of_whatever_it_died(self, make_offload, faulty, operation):
        faulty.faults = (Fault(operation=operation, effect="die"),)
        offload = make_offload(store=faulty, io_threads=1)
        with offload:
            y = leaf(64, 64).exp()
        with pytest.raises(SSDTrainError, match="I/O thread of ssdtrain died") as caught:
            offload.synchronize()
        assert isinstance(caught.value.__cause__, InjectedDeathError)
        del y

    def test_close_ends(self, offload):
        with offload:
            y = leaf(64, 64).exp()
        with pytest.raises(SSDTrainError):
            offload.synchronize()
        offload.close()
        del y

    def test_a_broken_read_ahead_is_raised(self, make_offload):
        class BrokenRead(WrapperStore):
            def read(self, extent, buffer, offset=0):
                if threading.current_thread().name.startswith("ssdtrain-io"):
                    raise ZeroDivisionError("a bug in a store")
                super().read(extent, buffer, offset)

        offload = make_offload(store=BrokenRead(HostStore()), io_threads=1)
        torch.manual_seed(0)
        leaves, forward = PROGRAM()
        with offload:
            loss = forward(*leaves)
        offload.synchronize()
        error = error_of(SSDTrainError, loss.backward)
        if error is None:  # the reads came too late
            assert_same_bits([one.grad for one in leaves], backward(PROGRAM)[1:])
        else:
            assert "a bug in a store" in str(error)
