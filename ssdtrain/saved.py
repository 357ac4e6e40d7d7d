"""What a saved tensor is: which storage it views and how, and which ones are never offloaded.

[Note: One storage, several version counters]
A view counts in-place changes together with the tensor that it is a view of, its root. Roots can share a storage, and
then none sees the changes of another: `.data` makes such roots, and so does `unsafe_chunk`, with which torch's
recurrent layers cut a tensor into gates that they change in place. Equal versions tell of equal bytes only for
saved tensors of one root. So a block belongs to a root, and goes no further than the root's own bytes.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ssdtrain.errors import ActivationLostError, InplaceModificationError
from ssdtrain.storage.base import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

__all__ = [
    "Geometry",
    "ModelStorages",
    "Span",
    "check_version",
    "is_plain",
    "refuse_unfilled",
    "root_of",
    "saved_unfilled",
]

# A view whose range of bytes is at most this fraction of its root's is stored alone: a slice of a large tensor
# must not write all of it. Below 1/3, so that q, k and v cut from one projection still share one write; then at
# most 4 times the range is written.
_SLICE_FRACTION = 1 / 4

# From a weight to what autograd saves of its autocast copy: the cast, and at most a few views.
_MAX_VIEWS_OF_WEIGHT = 4


class Geometry(NamedTuple):
    """How a tensor views its storage. Offset and strides are counted in elements."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """The geometry of a plain strided tensor."""
        return cls(
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def view(self, storage: Tensor, origin: int = 0) -> Tensor:
        """The tensor again.

        Args:
            storage: The same storage's bytes, uint8, one dimension. The view shares its version counter.
            origin: The place in the saved tensor's storage of their first, a multiple of 16 bytes. The view's
                offset is less by that.
        """
        rest = storage.numel() % self.dtype.itemsize
        elements = (storage[:-rest] if rest else storage).view(self.dtype)
        offset = self.offset - origin // self.dtype.itemsize
        tensor = elements.as_strided(self.shape, self.stride, offset)
        if self.conj:
            tensor = tensor.conj()
        if self.neg:
            tensor = torch._neg_view(tensor)
        got = (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        wanted = self.dtype, self.shape, self.stride, offset, self.conj, self.neg
        assert got == wanted, "autograd does not check what it gets"
        return tensor

    def byte_range(self) -> tuple[int, int]:
        """The first byte and one past the last byte that the view touches; strides are never negative."""
        end = self.offset + 1
        for size, stride in zip(self.shape, self.stride, strict=True):
            end += (size - 1) * stride
        return self.offset * self.dtype.itemsize, end * self.dtype.itemsize


class Span(NamedTuple):
    """The part of a storage that is a block, in bytes."""

    start: int
    nbytes: int
    storage_nbytes: int
    skew: int
    """Address of the part's first byte, modulo `PAGE`. Restored memory begins at the same place within a page as
    the original did: direct I/O then needs no copy, and kernels whose summation order depends on alignment give
    the same bits."""

    @classmethod
    def of(cls, tensor: Tensor, storage: torch.UntypedStorage, geometry: Geometry, root: Tensor) -> Span:
        """All bytes of the tensor's root, or only those of the tensor where the root is far larger."""
        total = storage.nbytes()
        if tensor.nbytes == total and tensor.is_contiguous():  # most are
            return cls(0, total, total, storage.data_ptr() % PAGE)
        start, end = geometry.byte_range()
        low, high = (0, total) if root.nbytes == total else Geometry.of(root).byte_range()
        if low <= start and end <= high and end - start > (high - low) * _SLICE_FRACTION:
            start, end = low, high
        return cls(start, end - start, total, (storage.data_ptr() + start) % PAGE)

    def covers(self, other: Span) -> bool:
        """Whether every byte of `other`, of the same storage, is in here."""
        return (
            self.storage_nbytes == other.storage_nbytes
            and self.start <= other.start
            and other.start + other.nbytes <= self.start + self.nbytes
        )


def root_of(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of, or itself. See [Note: One storage, several version counters]."""
    base = tensor._base
    return tensor if base is None else base


def is_plain(tensor: Tensor) -> bool:
    """Whether the values of a tensor are just bytes of a storage: no subclass, no wrapper, dense and strided."""
    return (
        (type(tensor) is Tensor or type(tensor) is nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_meta
        and not tensor._is_zerotensor()
        and not tensor.is_inference()
        and not is_functorch_wrapped_tensor(tensor)
        and tensor.numel() > 0
    )


def check_version(tensor: Tensor, version: int | None) -> None:
    """Check what autograd checks without hooks: that memory about to be used is what was saved.

    Args:
        tensor: Shares its version counter with the saved tensor.
        version: At the time of saving; None for tensors that do not count.

    Raises:
        InplaceModificationError: It was changed in place since.
    """
    if version is not None and tensor._version != version:
        raise InplaceModificationError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; it was saved at version "
            f"{version}. Use an out-of-place operation, or clone the tensor before changing it. (ssdtrain "
            "checks what torch checks without saved-tensor hooks.)"
        )


def saved_unfilled(caller: FrameType | None) -> bool:
    """Whether what is being saved has no value yet, and would be stored without one.

    Training-mode rrelu saves its noise and then fills it, and no version tells. Of all differentiable operations of
    torch it is the only one (tests/core/test_unfilled.py tries them).

    Args:
        caller: The Python frame that called the operation; None on a thread without Python.
    """
    return caller is not None and caller.f_code is torch.nn.functional.rrelu.__code__


def refuse_unfilled() -> None:
    """Refuse to give stored bytes to an operation that saved them unfilled, where `saved_unfilled` cannot tell.

    Raises:
        ActivationLostError: Always in the backward of `torch.rrelu`, called otherwise than through `torch.nn`.
    """
    node = torch._C._current_autograd_node()
    if node is not None and node.name().startswith("RreluWithNoiseBackward"):
        raise ActivationLostError(
            "torch.rrelu fills its noise after autograd has saved it, so what was offloaded is not the noise; "
            "call torch.nn.functional.rrelu or torch.nn.RReLU, whose noise is recognised and kept in memory"
        )


class ModelStorages:
    """The storages of a model's parameters and buffers: its weights live in memory anyway.

    Args:
        model: Whose parameters and buffers; None recognises `nn.Parameter`s and their views only.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        # id -> weak reference. An id alone says nothing, since ids are reused; the reference says whose it is.
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._weight_shapes: frozenset[torch.Size] = frozenset()
        self._frozen_shapes: frozenset[torch.Size] = frozenset()

    def refresh(self) -> None:
        """Look again: optimizers, `.to()` and `load_state_dict` may have given parameters other storages."""
        if self._model is None:
            return
        weights = [leaf for weight in self._weights(self._model) for leaf in _leaves(weight)]
        storages = [weight.untyped_storage() for weight in weights]
        self._refs = {id(storage): weakref.ref(storage) for storage in storages}
        wide = [weight for weight in weights if weight.dim() > 1 and weight.dtype.itemsize > 2]
        self._weight_shapes = _with_transposes(wide)
        self._frozen_shapes = _with_transposes(weight for weight in wide if not weight.requires_grad)

    @staticmethod
    def _weights(model: nn.Module) -> Iterator[Tensor]:
        yield from model.parameters()
        yield from model.buffers()

    def owns(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether a saved tensor is a weight, a view of one, or the low-precision copy that autocast made of one."""
        if self._is_weight(storage):
            return True
        owner = root_of(tensor)
        # The first test spares most tensors the second, for which nn.Parameter runs Python.
        if type(owner) is not Tensor and isinstance(owner, nn.Parameter):
            return True
        # Whether autocast is on cannot be asked here: operations that it has cast for run with it off.
        return (
            tensor.shape in self._weight_shapes
            and tensor.dtype is torch.get_autocast_dtype(tensor.device.type)
            and self._derives_from_weight(tensor)
        )

    def _is_weight(self, storage: torch.UntypedStorage) -> bool:
        ref = self._refs.get(id(storage))
        return ref is not None and ref() is storage

    def _derives_from_weight(self, tensor: Tensor) -> bool:
        # A copy of a frozen weight has no history: its shape is all there is to go by, and a wrong guess only
        # costs memory. A copy of a trained one leads back to the weight through the cast and views.
        node: Any = tensor.grad_fn
        if node is None:
            return tensor.shape in self._frozen_shapes
        for _ in range(_MAX_VIEWS_OF_WEIGHT):
            if len(node.next_functions) != 1 or node.next_functions[0][0] is None:
                return False
            node = node.next_functions[0][0]
            variable = getattr(node, "variable", None)
            if variable is not None:
                return self._is_weight(variable.untyped_storage())
        return False


def _with_transposes(weights: Iterable[Tensor]) -> frozenset[torch.Size]:
    shapes = {weight.shape for weight in weights}
    return frozenset(shapes | {shape[:-2] + shape[:-3:-1] for shape in shapes})


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors with memory behind a parameter, which may be a subclass that wraps several."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from _leaves(inner)
    elif type(tensor) in {Tensor, nn.Parameter} and tensor.layout is torch.strided and not tensor.is_meta:
        yield tensor
