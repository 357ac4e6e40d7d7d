"""Random small programs: the same bits in plain torch and under an offloader with random budgets.

A failing example is printed as the program itself: lines of Python over `x0` and `x1`, two leaves of 8 x 8.
"""

import warnings
from contextlib import closing, nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
    "{0}.softmax(0)",
    "{0} * 2",
    "{0} + 1",
)
BINARY = (
    "{0} + {1}",
    "{0} * {1}",
    "({0} @ {1}).tanh()",
    "torch.where({0} > 0, {0}, {1})",
    "torch.maximum({0}, {1})",
)
VIEWS = (
    "{0}.t()",
    "{0}[0].expand(8, 8)",
    "{0}[:, 3:4].expand(8, 8)",
    "{0}.as_strided((8, 8), (1, 8))",
    "{0}.reshape(4, 16).view(8, 8)",
    "torch.cat([{0}[3:], {0}[:3]])",
    "torch.cat({0}.chunk(2, 1)[::-1], 1)",
    "{0}[::2].sin().repeat(2, 1)",
    "{0}.view_as({0})",
    "{0}.detach()",
)
REGIONS = (
    "torch.dropout({0}, 0.3, True)",
    "checkpoint(lambda a: a.sin() * a, {0}, use_reentrant=False)",
    "checkpoint(lambda a: (a.sin() * a).exp().tanh(), {0}, use_reentrant=True)",
    "checkpoint(lambda a, b: torch.dropout(a.sin() * b, 0.3, True), {0}, {1}, use_reentrant=False)",
    "no_grad(lambda: {0}.exp() * {1})",
)
# Any of them may be illegal, because something has saved what they change: then torch raises, in both runs.
IN_PLACE = (
    "{0}.mul_(0.5)",
    "{0}.relu_()",
    "{0}.add_({1})",
    "{0}[2:].sin_()",
    "{0}.t()[1].zero_()",
    "{0}.tanh_()",
)
EFFECTS = ("backward({0})", "gradients({0})", "twice({0})", "settle()", "next_pass()", "record({0})")


@st.composite
def programs(draw):
    """Lines of Python."""
    names, lines = list(LEAVES), []
    for number in range(draw(st.integers(2, 14))):
        kind = draw(st.sampled_from(["value"] * 6 + ["in place", "effect", "effect", "drop"]))
        one, two = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        if kind == "value":
            text = draw(st.sampled_from(UNARY + BINARY + VIEWS + REGIONS))
            lines.append(f"t{number} = {text.format(one, two)}")
            names.append(f"t{number}")
        elif kind == "in place" and one not in LEAVES:
            lines.append(draw(st.sampled_from(IN_PLACE)).format(one, two))
        elif kind == "effect":
            lines.append(draw(st.sampled_from(EFFECTS)).format(one))
        elif kind == "drop" and one not in LEAVES:
            names.remove(one)
            lines.append(f"del {one}")
    return "\n".join([*lines, f"backward({names[-1]})"])


budgets = st.sampled_from([0, 1, 256, 600, 1 << 20])
options = st.fixed_dictionaries(
    {
        "prefetch_bytes": budgets,
        "store_queue_bytes": budgets,
        "on_full_queue": st.sampled_from(["keep", "wait"]),
        "io_threads": st.integers(1, 2),
        "min_tensor_bytes": st.sampled_from([0, 1, 257]),
    }
)


class Machine:
    """Runs a program; `results` is what it recorded, `error` what ended it."""

    def __init__(self, offload):
        torch.manual_seed(0)
        self.context = offload or nullcontext()
        self.leaves = [torch.randn(8, 8, requires_grad=True) for _ in LEAVES]
        self.results = []
        self.error = None
        self.settle = offload.synchronize if offload else lambda: None

    def run(self, program):
        calls = ("next_pass", "record", "gradients", "twice", "backward", "no_grad", "settle")
        names = {"torch": torch, "checkpoint": checkpoint} | {name: getattr(self, name) for name in calls}
        names |= dict(zip(LEAVES, self.leaves, strict=True))
        with self.context:
            try:
                exec(program, names)
            except RuntimeError as raised:
                self.error = raised.with_traceback(None)
        names.clear()

    def next_pass(self):
        self.context.__exit__(None, None, None)
        self.context.__enter__()

    def record(self, value):
        self.results.append(value.detach().clone())

    def gradients(self, value):
        if value.requires_grad:
            self.results += self.grad(value.sum())

    def twice(self, value):
        if value.requires_grad:
            first = [
                one
                for one in self.grad(value.sum(), create_graph=True)
                if one is not None and one.requires_grad
            ]
            if first:
                self.results += self.grad(sum(one.square().sum() for one in first))

    def grad(self, value, **options):
        return torch.autograd.grad(value, self.leaves, retain_graph=True, allow_unused=True, **options)

    def backward(self, value):
        if value.requires_grad:
            value.sum().backward(retain_graph=True)
            self.results += [None if one.grad is None else one.grad.clone() for one in self.leaves]

    @staticmethod
    def no_grad(function):
        with torch.no_grad():
            return function()


def run(program, offload):
    machine = Machine(offload)
    machine.run(program)
    return machine.results, machine.error


def check(program, config):
    wanted, torch_error = run(program, None)
    offload = ssdtrain.OffloadActivations(backend="host", **config)
    try:
        got, error = run(program, offload)
        if torch_error is None:
            assert error is None, f"only with offloading: {error}\n{program}"
            assert len(got) == len(wanted)
        # Where torch finds a change in place, we may have the saved value still, and go on.
        same = [same_bits(one, other) for one, other in zip(got, wanted, strict=False)]
        assert all(same), f"different bits: {same}\n{program}"
        assert len(got) >= len(wanted) or error is not None
        del got, error
        assert_nothing_left(offload)
    finally:
        offload.close()


FEW = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@given(program=programs(), config=options)
@FEW
def test_random_programs(program, config):
    check(program, config)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@given(program=programs(), config=options)
@settings(FEW, max_examples=3000)
def test_many_random_programs(program, config):
    check(program, config)


EXAMPLES = {
    "a view changed in place after it was saved": "t0 = x0 * 2\nt1 = t0.sin()\nt0[2:].sin_()\nbackward(t1)",
    "a value saved, settled, changed and saved again": (
        "t0 = x0 * 2\nt1 = t0.sin()\nsettle()\nt0.add_(1)\nt2 = t0.sin()\nsettle()\nbackward(t2)"
    ),
    "two passes over one graph": (
        "t0 = x0.sin()\nnext_pass()\nt1 = t0.exp() @ x1\nbackward(t1)\nnext_pass()\nbackward(t1)"
    ),
    "a checkpoint and its second derivative": (
        "t0 = checkpoint(lambda a: a.sin() * a, x0, use_reentrant=False)\ntwice(t0)"
    ),
    "a dropped branch": "t0 = x0.exp()\nt1 = t0.sin()\ndel t1\nsettle()\nbackward(t0)",
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_a_program(name, prefetch_bytes):
    check(EXAMPLES[name], {"min_tensor_bytes": 1, "prefetch_bytes": prefetch_bytes})


def test_the_generator_makes_programs_that_offload():
    """Most examples really write and read something."""
    counts = {"programs": 0, "written": 0, "read": 0}

    @given(program=programs())
    @settings(FEW, max_examples=30, database=None)
    def count(program):
        with closing(ssdtrain.OffloadActivations(backend="host", min_tensor_bytes=1)) as offload:
            run("\n".join(f"{line}\nsettle()" for line in program.splitlines()), offload)
            stats = offload.stats
        counts["programs"] += 1
        counts["written"] += stats.bytes_written > 0
        counts["read"] += stats.bytes_read > 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count()
    assert counts["written"] > counts["programs"] // 3
    assert counts["read"] > counts["programs"] // 5
