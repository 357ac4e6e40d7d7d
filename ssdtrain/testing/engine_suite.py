"""What every offloader must do, whatever it spills into, as tests to subclass.

```
class TestOverMyStore(EngineSuite):
    @pytest.fixture
    def offload(self, tmp_path):
        offload = OffloadOver(MyStore(tmp_path), min_tensor_bytes=1)
        yield offload
        offload.close()
```

Each test runs a small program in plain torch and under the offloader, and compares the loss and all gradients bit for
bit. Needs pytest, which nothing else in this package but `ssdtrain.testing.suite` does.
"""

from __future__ import annotations

import gc
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ssdtrain.errors import InplaceModificationError, SSDTrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ssdtrain.offload import OffloadActivations

    # Leaves, and a function of them that gives a scalar.
    Program = Callable[[], tuple[list[Tensor], Callable[..., Tensor]]]

__all__ = ["PROGRAMS", "EngineSuite", "gradients"]


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def _of_model(model: nn.Module, *shape: int) -> tuple[list[Tensor], Callable[..., Tensor]]:
    def forward(x: Tensor, *_: Tensor) -> Tensor:
        output: Tensor = model(x)
        return output.square().mean()

    return [_leaf(*shape), *model.parameters()], forward


def _chain() -> tuple[list[Tensor], Callable[..., Tensor]]:
    def forward(x: Tensor) -> Tensor:
        for _ in range(12):
            x = x.sin()
        return x.sum()

    return [_leaf(64, 65)], forward


def _perceptron() -> tuple[list[Tensor], Callable[..., Tensor]]:
    layers = [nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 48), nn.LayerNorm(48), nn.ReLU()]
    return _of_model(nn.Sequential(*layers), 33, 48)


def _attention() -> tuple[list[Tensor], Callable[..., Tensor]]:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        query, key, value = (x @ weight).view(2, 24, 3, 4, 8).permute(2, 0, 3, 1, 4)
        output: Tensor = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        return output.square().sum()

    return [_leaf(2, 24, 32), _leaf(32, 96)], forward


def _convolution() -> tuple[list[Tensor], Callable[..., Tensor]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)
    )
    leaves, forward = _of_model(model, 4, 3, 12, 10)
    return leaves, lambda x, *weights: forward(x.contiguous(memory_format=torch.channels_last), *weights)


def _recurrence() -> tuple[list[Tensor], Callable[..., Tensor]]:
    model = nn.GRU(16, 24, num_layers=2, batch_first=True)
    leaves, _ = _of_model(model, 3, 9, 16)
    return leaves, lambda x, *_: model(x)[0].square().mean()


def _complex() -> tuple[list[Tensor], Callable[..., Tensor]]:
    def forward(x: Tensor) -> Tensor:
        z = torch.view_as_complex(x)
        return (z * z.conj()).real.sum() + (z.conj().imag * z.real).sum()

    return [_leaf(40, 30, 2)], forward


def _views() -> tuple[list[Tensor], Callable[..., Tensor]]:
    def forward(x: Tensor, row: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        square = left @ right.t()
        return (square * square.t()).sum() + (x[1:] * row.expand(39, 50)).sin().sum() + x[:, ::2].exp().mean()

    return [_leaf(40, 50), _leaf(50)], forward


def _shifted_labels() -> tuple[list[Tensor], Callable[..., Tensor]]:
    labels = torch.arange(41) % 30

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return functional.cross_entropy(x @ weight, labels[1:])

    return [_leaf(40, 16), _leaf(16, 30)], forward


def _checkpointed() -> tuple[list[Tensor], Callable[..., Tensor]]:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return functional.dropout((x @ weight).tanh(), 0.2)

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(block, x, weight, use_reentrant=False)
        return x.square().sum()

    return [_leaf(30, 20), _leaf(20, 20)], forward


PROGRAMS: dict[str, Program] = {
    "chain": _chain,
    "perceptron": _perceptron,
    "attention": _attention,
    "convolution": _convolution,
    "recurrence": _recurrence,
    "complex": _complex,
    "views": _views,
    "shifted labels": _shifted_labels,
    "checkpointed": _checkpointed,
}


def gradients(
    program: Program, offload: OffloadActivations | None = None, *, settle: bool = True, seed: int = 0
) -> list[Tensor | None]:
    """Loss and gradients of a program, in plain torch or under an offloader.

    Args:
        program: Made anew after seeding.
        offload: The context for the forward pass; None: plain torch.
        settle: Whether all that can go to the store is there before backward begins.
        seed: Of leaves and dropout.
    """
    torch.manual_seed(seed)
    leaves, forward = program()
    with offload or nullcontext():
        loss = forward(*leaves)
    if offload is not None and settle:
        offload.synchronize()
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _assert_same_bits(got: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(_bits(one), _bits(other)), "other bits than in plain torch"


class _SavesItsInput(torch.autograd.Function):
    """Reads twice what it saved, and shows it in `seen`."""

    seen: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        one: Tensor = ctx.saved_tensors[0]
        two: Tensor = ctx.saved_tensors[0]
        _SavesItsInput.seen += [one, two]
        return grad.expand(one.shape) * one


class EngineSuite(ABC):
    """The contract of `OffloadActivations`. A subclass gives the offloader, and says what it is over."""

    spills: ClassVar[bool] = True
    """Whether blocks really go to the store; False where the offloader is made to keep everything."""

    device: ClassVar[str] = "cpu"
    """Where the tensors of the programs are."""

    @pytest.fixture
    @abstractmethod
    def offload(self) -> Any:
        """An open offloader of tensors of every size; closed after the test."""

    @pytest.fixture(autouse=True)
    def _on_the_device(self) -> Any:
        # On the CPU without the context, for it would be one more thing between a program and torch.
        with nullcontext() if self.device == "cpu" else torch.device(self.device):
            yield

    @pytest.fixture(autouse=True)
    def _nothing_is_left(self, offload: OffloadActivations) -> Any:
        yield
        gc.collect()
        deadline = time.monotonic() + 30
        # A worker may still be at a block that nobody wants any more.
        while offload.stats.live_blocks or offload.stats.live_bytes_on_disk:
            assert time.monotonic() < deadline, f"left behind: {offload.stats}"
            time.sleep(0.001)

    @pytest.mark.parametrize("settle", [True, False], ids=["settled", "at once"])
    @pytest.mark.parametrize("name", PROGRAMS)
    def test_bits_are_those_of_plain_torch(
        self, offload: OffloadActivations, name: str, settle: bool
    ) -> None:
        """In the first pass, and in the second, whose order of reads is known."""
        program = PROGRAMS[name]
        for seed in (0, 1):
            wanted = gradients(program, seed=seed)
            _assert_same_bits(gradients(program, offload, settle=settle, seed=seed), wanted)
        if self.spills and settle:
            assert offload.stats.bytes_written > 0
            assert offload.stats.bytes_read > 0

    def test_backward_inside_the_context(self, offload: OffloadActivations) -> None:
        """Or outside of it."""
        wanted = gradients(_chain)
        torch.manual_seed(0)
        leaves, forward = _chain()
        with offload:
            loss = forward(*leaves)
            loss.backward()  # type: ignore[no-untyped-call]
        _assert_same_bits([loss.detach(), leaves[0].grad], wanted)

    def test_backward_again_and_again(self, offload: OffloadActivations) -> None:
        """A block lives until its graph dies, and not until it was asked for."""
        x = _leaf(40, 41)
        with offload:
            loss = x.sin().exp().sum()
        offload.synchronize()
        grads = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(3)]
        (plain,) = torch.autograd.grad(x.sin().exp().sum(), x)
        for grad in grads:
            _assert_same_bits([grad], [plain])

    def test_the_gradient_of_a_gradient(self, offload: OffloadActivations) -> None:
        """Both graphs are walked over the restored blocks."""

        def second(x: Tensor) -> Tensor:
            (first,) = torch.autograd.grad(x.sin().pow(3).sum(), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)[0]

        x = _leaf(30, 31)
        wanted = second(x)
        with offload:
            _assert_same_bits([second(x)], [wanted])

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
    def test_several_passes_before_their_backwards(
        self, offload: OffloadActivations, order: tuple[int, ...]
    ) -> None:
        """In any order."""
        wanted = [gradients(_chain, seed=seed) for seed in range(3)]
        graphs = []
        for seed in range(3):
            torch.manual_seed(seed)
            leaves, forward = _chain()
            with offload:
                graphs.append((leaves, forward(*leaves)))
        for seed in order:
            leaves, loss = graphs[seed]
            loss.backward()  # type: ignore[no-untyped-call]
            _assert_same_bits([loss.detach(), leaves[0].grad], wanted[seed])

    def test_saved_tensors_read_twice(self, offload: OffloadActivations) -> None:
        """In one backward pass."""
        x = _leaf(50, 20)
        with offload:
            loss: Tensor = _SavesItsInput.apply(x.sin())  # type: ignore[no-untyped-call]
        offload.synchronize()
        loss.backward()  # type: ignore[no-untyped-call]
        one, two = _SavesItsInput.seen
        _SavesItsInput.seen.clear()
        _assert_same_bits([one, two], [x.detach().sin(), x.detach().sin()])

    @pytest.mark.parametrize("settle", [True, False], ids=["settled", "at once"])
    def test_a_change_in_place_raises_or_does_no_harm(
        self, offload: OffloadActivations, settle: bool
    ) -> None:
        """Plain torch raises; an offloader that has the old bytes may use them."""
        x = _leaf(40, 41)
        with offload:
            a = x * 1
            loss = a.sin().sum()
        if settle:
            offload.synchronize()
        a.detach().add_(100)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except InplaceModificationError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017 - it need not be raised
        else:
            _assert_same_bits([x.grad], [x.detach().cos()])

    def test_weights_are_not_written(self, offload: OffloadActivations) -> None:
        """The input is; the weight and its transpose are not."""
        layer = nn.Linear(64, 64)
        x = torch.randn(16, 64)
        with offload:
            loss = layer(x).sum()
        offload.synchronize()
        assert offload.stats.bytes_written <= x.nbytes
        loss.backward()

    def test_a_dropped_graph_is_forgotten(self, offload: OffloadActivations) -> None:
        """Without a backward pass."""
        for _ in range(5):
            with offload:
                output = _leaf(60, 60).sin().exp()
            del output

    def test_a_pass_without_gradients_stores_nothing(self, offload: OffloadActivations) -> None:
        """As in an evaluation between two steps."""
        before = offload.stats.tensors_packed
        with torch.no_grad(), offload:
            _leaf(60, 60).sin().exp()
        assert offload.stats.tensors_packed == before

    def test_an_error_in_forward_and_a_clean_step_after_it(self, offload: OffloadActivations) -> None:
        """The context lets the error through."""

        def fail() -> None:
            with offload:
                _leaf(60, 60).sin().exp()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        _assert_same_bits(gradients(_perceptron, offload), gradients(_perceptron))

    def test_forward_passes_of_several_threads(self, offload: OffloadActivations) -> None:
        """One offloader may serve them all."""
        inputs = [torch.randn(60, 61, requires_grad=True) for _ in range(3)]
        wanted = [torch.autograd.grad(x.sin().exp().tanh().sum(), x)[0] for x in inputs]
        ready = threading.Barrier(3, timeout=60)

        def one_thread(x: Tensor) -> Tensor:
            ready.wait()
            for _ in range(5):
                with offload:
                    loss = x.sin().exp().tanh().sum()
                (grad,) = torch.autograd.grad(loss, x)
            return grad

        with ThreadPoolExecutor(3) as pool:
            _assert_same_bits(list(pool.map(one_thread, inputs)), wanted)

    def test_statistics_are_plain_numbers_that_only_grow(self, offload: OffloadActivations) -> None:
        """All but `backend` and what is alive now."""
        before = offload.stats
        gradients(_perceptron, offload)
        after = offload.stats
        for field in fields(after):
            old, new = getattr(before, field.name), getattr(after, field.name)
            if field.name == "backend":
                assert isinstance(new, str)
            else:
                assert type(new) in {int, float}
                assert field.name.startswith("live_") or new >= old

    def test_waiting_with_nothing_queued(self, offload: OffloadActivations) -> None:
        """Returns at once."""
        offload.synchronize()

    def test_closing_twice(self, offload: OffloadActivations) -> None:
        """Is allowed; entering after it is an error."""
        gradients(_chain, offload)
        offload.close()
        offload.close()
        with pytest.raises(SSDTrainError, match="closed"), offload:
            pass
