"""Random small programs over autograd, and what a run under an offloader must have in common with one in plain torch.

A program is lines of Python over `x0` and `x1`, two leaves of 8 x 8. Every value in it is 8 x 8 and float32, so that
any line can follow any other; what a line saves on its way may be of any shape and data type. Shared by
test_programs.py and scripts/fuzz.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ssdtrain

from .helpers import assert_nothing_left, same_bits

LEAVES = ("x0", "x1")

UNARY = (
    "{0}.sin()",
    "{0}.tanh().exp()",
    "{0}.relu()",
    "{0}.sigmoid()",
    "{0} * {0}",
    "{0} * 2",
    "{0} + 1",
    "{0}.softmax(0)",
    "{0}.cumsum(1).tanh()",
    "{0} - {0}.logsumexp(0)",
    "{0} / {0}.std(0, keepdim=True)",
    "functional.layer_norm({0}, (8,))",
    "functional.gelu({0})",
    "functional.max_pool1d({0}, 2).repeat(1, 2)",
)
BINARY = (
    "{0} + {1}",
    "{0} * {1}",
    "({0} @ {1}).tanh()",
    "torch.where({0} > 0, {0}, {1})",
    "torch.maximum({0}, {1})",
    "{0}.masked_fill({1} > 0, 0.5)",
    "functional.embedding({0}.argsort(0)[0], {1})",
    "functional.conv1d({0}[None], {1}[:, :, None])[0].tanh()",
    "functional.scaled_dot_product_attention({0}[None], {1}[None], {0}[None])[0]",
    "torch.lstm_cell({0}, ({1}, {0}), torch.cat([{1}] * 4), torch.cat([{0}] * 4))[0]",
    "torch.gru_cell({0}, {1}, torch.cat([{1}] * 3), torch.cat([{0}] * 3))",
)
VIEWS = (
    "{0}.t()",
    "{0}[0].expand(8, 8)",
    "{0}[:, 3:4].expand(8, 8)",
    "{0}.as_strided((8, 8), (1, 8))",
    "{0}.reshape(4, 16).view(8, 8)",
    "{0}.view_as({0})",
    "{0}.detach()",
    "{0}[::2].sin().repeat(2, 1)",
    "{0}.narrow(1, 2, 4).exp().tanh().repeat(1, 2)",
    "{0}[1:7].t() @ {1}[2:].sin()",
    "{0}.diagonal() * {1}",
    "{0}.diagonal().diag_embed().t() + {1}",
    "{0}.unfold(1, 4, 4).sin().reshape(8, 8)",
    "{0}.reshape(64)[:15].unfold(0, 8, 1)",
    "{0}.reshape(64)[:15].unfold(0, 8, 1) * {1}",
    "torch.outer({0}.select(1, 3), {1}[2])",
    "{0}[[1, 1, 2, 3, 0, 5, 7, 6]]",
    # Slices that are a block by themselves, for they are small beside their storage.
    "torch.cat([{0}, {1}] * 4)[8:16]",
    "torch.cat([{0}, {1}] * 4).narrow(0, 20, 8).sin()",
    "torch.stack([{0}] * 9, 2)[:, :, 4] * {1}",
)
PARTS = (
    "torch.cat([{0}[3:], {0}[:3]])",
    "torch.cat({0}.chunk(2, 1)[::-1], 1)",
    "torch.stack({0}.sin().unbind(1)[::-1])",
    "{0}.topk(8, 0).values",
    "{0}.sort(1, descending=True).values * {1}",
    "{0}.max(0, keepdim=True).values * {1}",
    "sum({0}.exp().tanh().split(2)).repeat(4, 1)",
)
COMPLEX = (
    "as_real(as_complex({0}).exp()).tanh()",
    "as_real(as_complex({0}) * as_complex({1}).conj())",
    "as_real((as_complex({0}).conj() * 2j).sin()).tanh()",
    "as_complex({0}).conj().imag.sin().repeat(1, 2)",
    "as_complex({0}).abs().repeat(1, 2) * {1}",
    "torch.fft.ifft(torch.fft.fft({0}) * torch.fft.fft({1}).conj()).real.tanh()",
)
DTYPES = (
    "{0}.double().sin().float()",
    "({0}.double() @ {1}.double()).tanh().float()",
    "{0}.bfloat16().tanh().exp().float()",
    "({0}.bfloat16() * {1}.bfloat16()).float()",
    "({0} * {1}.double()).float()",
    "autocast(lambda: ({0} @ {1}).tanh()).float()",
)
FUNCTIONS = ("Thorough.apply({0}, {1})", "Consuming.apply({0})", "slope({0})", "slope({0} * {1})")
REGIONS = (
    "torch.dropout({0}, 0.3, True)",
    "no_grad(lambda: {0}.exp() * {1})",
    "checkpoint(lambda a: a.sin() * a, {0}, use_reentrant=False)",
    "checkpoint(lambda a: (a.sin() * a).exp().tanh(), {0}, use_reentrant=True)",
    "checkpoint(lambda a, b: torch.dropout(a.sin() * b, 0.3, True), {0}, {1}, use_reentrant=False)",
    "checkpoint(lambda a: inside(lambda: a.sin() * a), {0}, use_reentrant=False)",
    (
        "checkpoint(lambda a: checkpoint(lambda b: b.sin() * b, a.tanh(), use_reentrant=False).cos(), {0}, "
        "use_reentrant=False)"
    ),
    (
        "checkpoint(lambda a: checkpoint(lambda b: b.sin() * b, a.tanh(), use_reentrant=True).cos(), {0}, "
        "use_reentrant=True)"
    ),
    "in_thread(lambda: {0}.sin() * {1})",
    "in_thread(lambda: ({0} * {1}).exp().tanh())",
    "nested(lambda: ({0}.sin() * {1}).tanh())",
    "nested(lambda: {0}.exp().tanh())",
)
VALUES = UNARY + BINARY + VIEWS + PARTS + COMPLEX + DTYPES + FUNCTIONS + REGIONS
# Two values that share a storage. Those of `chunk`, `split` and `unbind` may not be changed in place; those of
# `unsafe_chunk` may, and none tells of the other's changes.
PAIRS = (
    "torch.cat([{0}, {1}]).chunk(2)",
    "torch.cat([{0}, {1}], 1).split(8, 1)",
    "torch.stack([{0}, {1}], 2).unbind(2)",
    "torch.cat([{0}, {1}]).unsafe_chunk(2)",
    "torch.cat([{0}, {1}] * 4).sin().split(8)[2:4]",
    "(pair := torch.cat([{0}, {1}]))[:8], pair[8:].t()",
    "(whole := {0} * {1}), whole.t()",
)
# Any of them may be illegal, because something has saved what they change: then torch raises, in both runs.
IN_PLACE = (
    "{0}.mul_(0.5)",
    "{0}.relu_()",
    "{0}.add_({1})",
    "{0}.tanh_()",
    "{0}[2:].sin_()",
    "{0}.t()[1].zero_()",
    "{0}.diagonal().fill_(0.3)",
    "{0}[1:3] = {1}[2:4]",
    "{0}.copy_({1})",
    "{0}.masked_fill_({1} > 0, 0.1)",
    "{0}.detach().mul_(0.5)",
)
ON_ANYTHING_IN_PLACE = ("no_grad(lambda: {0}.mul_(0.9))", "no_grad(lambda: {0}[:4].add_(0.1))")
ILLEGAL = ("x0.add_(1)", "x1[2:].zero_()", "{0}.unbind()[1].mul_(2)", "{0}.chunk(2)[0].tanh_()")
EFFECTS = (
    "backward({0})",
    "gradients({0})",
    "twice({0})",
    "in_thread(lambda: backward({0}))",
    "hook({0})",
    "saved_of({0})",
    "record({0})",
    "settle()",
    "settle()",
    "next_pass()",
)
LAST_BACKWARD = "backward({0}, retain_graph=False)"

TEMPLATES = {
    "value": VALUES,
    "pair": PAIRS,
    "in place": IN_PLACE,
    "in place on anything": ON_ANYTHING_IN_PLACE,
    "illegal": ILLEGAL,
    "effect": EFFECTS,
    "last backward": (LAST_BACKWARD,),
    "drop": ("del {0}",),
}
OFTEN = {"value": 14, "pair": 2, "in place": 3, "effect": 5, "drop": 2}
KINDS = [kind for kind in TEMPLATES for _ in range(OFTEN.get(kind, 1))]
NOT_ON_LEAVES = ("in place", "illegal", "drop")


@st.composite
def programs(draw):
    """Lines of Python."""
    names, lines = list(LEAVES), []
    for number in range(draw(st.integers(2, 16))):
        kind = draw(st.sampled_from(KINDS))
        one, two = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        if kind in NOT_ON_LEAVES and one in LEAVES:
            continue
        made = {"value": [f"t{number}"], "pair": [f"t{number}", f"u{number}"]}.get(kind, [])
        line = draw(st.sampled_from(TEMPLATES[kind])).format(one, two)
        lines.append(f"{', '.join(made)} = {line}" if made else line)
        names += made
        if kind == "drop":
            names.remove(one)
    return "\n".join([*lines, f"backward({names[-1]})"])


budgets = st.sampled_from([0, 1, 256, 600, 1 << 20])
options = st.fixed_dictionaries(
    {
        "prefetch_bytes": budgets,
        "store_queue_bytes": budgets,
        "on_full_queue": st.sampled_from(["keep", "wait"]),
        "io_threads": st.integers(1, 2),
        "min_tensor_bytes": st.sampled_from([0, 1, 257]),
        "verify": st.booleans(),
    }
)

# Of hypothesis, for whatever runs random programs.
EXAMPLES = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


class Thorough(torch.autograd.Function):
    """Saves what it gets and what it gives, and reads that twice."""

    @staticmethod
    def forward(ctx, x, y):
        z = x.sin() * y
        ctx.save_for_backward(x, y, z)
        return z

    @staticmethod
    def backward(ctx, grad):
        x, y, z = ctx.saved_tensors
        assert all(same_bits(*pair) for pair in zip(ctx.saved_tensors, (x, y, z), strict=True))
        again = ctx.saved_tensors
        return grad * again[1] * x.cos(), grad * again[0].sin() * z * y


class Consuming(torch.autograd.Function):
    """Saves what only it has, and uses that up: in plain torch a second backward raises."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh().exp()
        ctx.save_for_backward(y)
        return y + 1

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.saved_tensors[0].mul_(grad)


class Copying(saved_tensors_hooks):
    """Gives backward what was saved, whatever became of it: what may be got where plain torch raises.

    Copies have the strides and the alignment of the original, so that kernels give the same bits.
    """

    def __init__(self):
        super().__init__(self.copy, self.copy)

    @staticmethod
    def copy(tensor):
        detached = tensor.detach()
        storage = detached.untyped_storage().clone()
        geometry = detached.storage_offset(), detached.shape, detached.stride()
        copied = torch.empty(0, dtype=tensor.dtype).set_(storage, *geometry)
        copied = copied.conj() if tensor.is_conj() else copied
        return torch._neg_view(copied) if tensor.is_neg() else copied


def forget_failed_backward():
    """What a failed backward pass has not got to stays in the thread's queue, and alive, until the next one."""
    torch.ones(1, requires_grad=True).sum().backward()


class Outcome(NamedTuple):
    """What a program recorded, and what ended it."""

    results: list[torch.Tensor | None]
    error: RuntimeError | None


class Machine:
    """Runs one program.

    Args:
        context: Around the forward passes.
        second: Nested in it, where the program says so.
        settle: What "settle()" calls.
    """

    def __init__(self, context: Any = None, second: Any = None, settle: Any = None) -> None:
        torch.manual_seed(0)
        self.context = context or nullcontext()
        self.second = second or nullcontext()
        self.settle = settle or (lambda: None)
        self.leaves = [torch.randn(8, 8, requires_grad=True) for _ in LEAVES]
        self.results: list[torch.Tensor | None] = []

    def run(self, program):
        calls = (
            *("settle", "next_pass", "record", "saved_of", "hook", "gradients", "twice", "backward", "slope"),
            *("no_grad", "autocast", "inside", "in_thread", "nested", "as_complex", "as_real"),
        )
        names = {"torch": torch, "functional": functional, "checkpoint": checkpoint}
        names |= {"Thorough": Thorough, "Consuming": Consuming}
        names |= {name: getattr(self, name) for name in calls}
        names |= dict(zip(LEAVES, self.leaves, strict=True))
        error = None
        with self.context:
            try:
                exec(program, names)
            except RuntimeError as raised:
                error = raised.with_traceback(None)
        names.clear()
        forget_failed_backward()
        return Outcome(self.results, error)

    # Effects.

    def next_pass(self):
        self.context.__exit__(None, None, None)
        self.context.__enter__()

    def record(self, value):
        self.results.append(value.detach().clone())

    def saved_of(self, value):
        """Reads what a node has saved, outside of any backward pass."""
        node = value.grad_fn
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(saved := getattr(node, name), torch.Tensor):
                self.record(saved)

    @staticmethod
    def hook(value):
        # Asked for first: torch crashes on a hook for a view whose base was changed under no_grad in the meantime.
        if value.requires_grad and (value.grad_fn or value.is_leaf):
            value.register_hook(lambda grad: None if grad is None else grad * 2)

    def gradients(self, value):
        if value.requires_grad:
            self.results += self._grad(value.sum())

    def twice(self, value):
        if value.requires_grad:
            first = [one for one in self._grad(value.sum(), create_graph=True) if one is not None]
            first = [one for one in first if one.requires_grad]
            if first:
                self.results += self._grad(sum(one.square().sum() for one in first))

    def backward(self, value, *, retain_graph=True):
        if value.requires_grad:
            value.sum().backward(retain_graph=retain_graph)
            self.results += [None if one.grad is None else one.grad.clone() for one in self.leaves]

    def _grad(self, value, **options):
        return torch.autograd.grad(value, self.leaves, retain_graph=True, allow_unused=True, **options)

    # Values.

    def slope(self, value):
        """A gradient that can be derived again."""
        if not value.requires_grad:
            return value
        grad = self._grad(value.sin().sum(), create_graph=True)
        return next((one for one in grad if one is not None), value)

    @staticmethod
    def no_grad(function):
        with torch.no_grad():
            return function()

    @staticmethod
    def autocast(function):
        with torch.autocast("cpu", torch.bfloat16):
            return function()

    def inside(self, function):
        with self.context:
            return function()

    def nested(self, function):
        with self.second:
            return function()

    def in_thread(self, function):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.inside, function).result()

    @staticmethod
    def as_complex(value):
        return torch.view_as_complex(value.reshape(8, 4, 2).contiguous())

    @staticmethod
    def as_real(value):
        return torch.view_as_real(value.resolve_conj()).reshape(8, 8)


def run_plain(program):
    """In plain torch."""
    return Machine().run(program)


def run_with_copies(program):
    """With a copy of everything that is saved."""
    return Machine(Copying(), Copying()).run(program)


def run_offloaded(program, offload, second):
    """Under two offloaders, which may be one."""

    def settle():
        offload.synchronize()
        second.synchronize()

    return Machine(offload, second, settle).run(program)


def check(program, config, second=None):
    """Run a program both ways; assert that nothing differs and nothing is left.

    Args:
        program: Lines of Python.
        config: Options of the offloader.
        second: Those of the second one; None: as the first.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        plain = run_plain(program)
        first, second = (
            ssdtrain.OffloadActivations(backend="host", **one) for one in (config, second or config)
        )
        try:
            got = run_offloaded(program, first, second)
            _compare(program, got, plain)
            del got
            for offload in (second, first):
                assert_nothing_left(offload)
        finally:
            first.close()
            second.close()


def _compare(program, got, plain):
    assert len(got.results) >= len(plain.results), f"too early: {got.error!r}\n{program}"
    wanted = plain
    if _says(plain.error, *CHANGED_IN_PLACE):
        # We may have the saved value still, and go on; with what was saved, or with an error of ours.
        wanted = run_with_copies(program)
        if isinstance(got.error, ssdtrain.InplaceModificationError):
            wanted = Outcome(wanted.results[: len(got.results)], got.error)
    assert _text(got.error) == _text(wanted.error), f"with offloading: {got.error!r}\n{program}"
    assert len(got.results) == len(wanted.results), f"{len(got.results)} results\n{program}"
    same = [same_bits(*pair) for pair in zip(got.results, wanted.results, strict=True)]
    assert all(same), f"different bits: {same}\n{program}"


# What torch says of a saved tensor: where its version has moved, and where it is one of several views made at once.
CHANGED_IN_PLACE = ("modified by an inplace operation", "has been modified inplace")


def _says(error, *texts):
    return any(text in str(error) for text in texts)


def _text(error):
    return None if error is None else str(error)
