"""Random small programs: the same bits in plain torch and under an offloader with random budgets.

A failing example is printed as the program itself, see programs.py. `scripts/fuzz --programs N` runs more of them.
"""

import warnings
from contextlib import closing

import pytest
from hypothesis import given, settings

import ssdtrain

from .programs import (
    EXAMPLES,
    IN_PLACE,
    ON_ANYTHING_IN_PLACE,
    PAIRS,
    VALUES,
    check,
    options,
    programs,
    run_offloaded,
    run_plain,
)


@given(program=programs(), config=options, second=options)
@settings(EXAMPLES, max_examples=300)
def test_random_programs(program, config, second):
    check(program, config, second)


@pytest.mark.slow
@given(program=programs(), config=options, second=options)
@settings(EXAMPLES, max_examples=3000)
def test_many_random_programs(program, config, second):
    check(program, config, second)


KNOWN = {
    "a view changed in place after it was saved": "t0 = x0 * 2\nt1 = t0.sin()\nt0[2:].sin_()\nbackward(t1)",
    "a value saved, settled, changed and saved again": (
        "t0 = x0 * 2\nt1 = t0.sin()\nsettle()\nt0.add_(1)\nt2 = t0.sin()\nsettle()\nbackward(t2)"
    ),
    "a leaf changed as by an optimizer, after it was settled": (
        "t0 = x0.sin()\nsettle()\nno_grad(lambda: x0.mul_(0.9))\nbackward(t0)"
    ),
    "two passes over one graph": (
        "t0 = x0.sin()\nnext_pass()\nt1 = t0.exp() @ x1\nbackward(t1)\nnext_pass()\nbackward(t1)"
    ),
    "a checkpoint and its second derivative": (
        "t0 = checkpoint(lambda a: a.sin() * a, x0, use_reentrant=False)\ntwice(t0)"
    ),
    "a dropped branch": "t0 = x0.exp()\nt1 = t0.sin()\ndel t1\nsettle()\nbackward(t0)",
    "a graph that is used up": (
        "t0 = x0.exp() * x1\nsettle()\nbackward(t0, retain_graph=False)\nbackward(t0)"
    ),
    "saved in one thread, asked for in another": (
        "t0 = in_thread(lambda: x0.exp() * x1)\nsettle()\nin_thread(lambda: backward(t0))\nbackward(t0)"
    ),
    "two offloaders": "t0 = nested(lambda: x0.exp() * x1)\nt1 = t0.sin()\nsettle()\ntwice(t1)",
    "parts that do not tell of each other's changes": (
        "t0, t1 = torch.cat([x0, x1]).unsafe_chunk(2)\nt2 = t0.sin()\nt1.mul_(2)\nt3 = t1.sin()\n"
        "t0.mul_(3)\nt4 = t1.cos()\nsettle()\nbackward(t3 * t4)"
    ),
    "a node that changes what it saved": "t0 = Consuming.apply(x0)\nsettle()\nbackward(t0)\nbackward(t0)",
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_a_program(name, prefetch_bytes):
    check(KNOWN[name], {"min_tensor_bytes": 1, "prefetch_bytes": prefetch_bytes})


LINES = [f"t3 = {line}" for line in VALUES] + [f"t3, t4 = {line}" for line in PAIRS]
LINES += [f"t3 = {{0}} * 3\n{line.replace('{0}', 't3')}" for line in IN_PLACE + ON_ANYTHING_IN_PLACE]


@pytest.mark.parametrize("line", LINES)
def test_every_line_of_the_grammar(line):
    """By itself, in a program in which nothing is illegal: it runs, and offloading changes nothing."""
    before = "t0 = x0 * 2\nt1 = t0 + 0\nt2 = x1 * 3"
    program = f"{before}\n{line.format('t1', 't2')}\nsettle()\nbackward(t3)"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        assert run_plain(program).error is None
    check(program, {"min_tensor_bytes": 1})


def test_the_generator_makes_programs_that_offload():
    """Most examples really write and read something, and get to their end."""
    counts = {"programs": 0, "written": 0, "read": 0, "whole": 0}

    @given(program=programs())
    @settings(EXAMPLES, max_examples=50, database=None)
    def count(program):
        with closing(ssdtrain.OffloadActivations(backend="host", min_tensor_bytes=1)) as offload:
            settled = "\n".join(f"{line}\nsettle()" for line in program.splitlines())
            outcome = run_offloaded(settled, offload, offload)
            stats = offload.stats
        counts["programs"] += 1
        counts["written"] += stats.bytes_written > 0
        counts["read"] += stats.bytes_read > 0
        counts["whole"] += outcome.error is None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count()
    assert counts["written"] > counts["programs"] // 3
    assert counts["read"] > counts["programs"] // 5
    assert counts["whole"] > counts["programs"] // 3
