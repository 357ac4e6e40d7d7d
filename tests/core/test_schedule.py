"""In which order blocks are expected: pure arithmetic."""

import gc
import weakref

import pytest

from ssdtrain.schedule import Pass, Schedule

TASK = 1  # one backward pass, as autograd numbers them


class Span:
    def __init__(self, nbytes):
        self.nbytes = nbytes


class Storage:
    pass


class Root:
    pass


class Block:
    """As much of a block as a pass looks at."""

    def __init__(self, nbytes=1):
        self.span = Span(nbytes)
        self.source = Storage()
        self.root_itself = Root()
        self.storage, self.root = weakref.ref(self.source), weakref.ref(self.root_itself)


@pytest.fixture
def schedule():
    return Schedule()


def forward(schedule, sizes=(1, 1, 1, 1)):
    one = Pass(schedule)
    blocks = [Block(size) for size in sizes]
    assert [one.add(block) for block in blocks] == list(range(len(blocks)))
    return one, blocks


def expected(one, blocks):
    """All that is expected, in order."""
    order = []
    while (block := one.next()) is not None:
        order.append(blocks.index(block))
        one.advance()
    return order


def ask_all(one, blocks, order):
    for at in order:
        one.ask(at, TASK)
    for _ in blocks:
        one.forget()


def test_nothing_is_expected_before_backward_has_asked(schedule):
    one, blocks = forward(schedule)
    assert expected(one, blocks) == []
    assert not one.begun_backward


def test_the_reverse_of_packing_until_an_order_is_known(schedule):
    one, blocks = forward(schedule)
    one.ask(3, TASK)
    assert one.begun_backward
    assert expected(one, blocks) == [2, 1, 0]


def test_the_order_of_the_last_backward(schedule):
    one, blocks = forward(schedule)
    ask_all(one, blocks, [3, 1, 2, 0])
    two, blocks = forward(schedule)
    two.ask(3, TASK)
    assert expected(two, blocks) == [1, 2, 0]


def test_an_order_is_learnt_when_the_last_block_is_freed(schedule):
    one, blocks = forward(schedule)
    for at in (3, 1, 2, 0):
        one.ask(at, TASK)
    assert [bool(one.forget()) for _ in blocks] == [False, False, False, True]


def test_the_newest_order_counts(schedule):
    for order in ([3, 1, 2, 0], [0, 1, 2, 3]):
        one, blocks = forward(schedule)
        ask_all(one, blocks, order)
    two, blocks = forward(schedule)
    two.ask(0, TASK)
    assert expected(two, blocks) == [1, 2, 3]


def test_another_shape_has_its_own_order(schedule):
    one, blocks = forward(schedule)
    ask_all(one, blocks, [0, 1, 2, 3])
    two, blocks = forward(schedule, sizes=(2, 2, 2, 2))
    two.ask(3, TASK)
    assert expected(two, blocks) == [2, 1, 0]


def test_what_was_asked_for_is_not_expected_again(schedule):
    one, blocks = forward(schedule)
    one.ask(3, TASK)
    one.ask(1, TASK)
    assert expected(one, blocks) == [0]


def test_a_jump_back_does_not_bring_back_what_was_taken(schedule):
    one, blocks = forward(schedule)
    one.ask(0, TASK)
    one.ask(3, TASK)
    assert expected(one, blocks) == []


def test_dead_blocks_are_skipped(schedule):
    one, blocks = forward(schedule)
    kept = [blocks[0], blocks[2], blocks[3]]
    del blocks
    gc.collect()
    one.ask(3, TASK)
    assert expected(one, kept) == [1, 0]


def test_a_pass_that_backward_never_asked_teaches_nothing(schedule):
    one, blocks = forward(schedule)
    for _ in blocks:
        one.forget()
    two, blocks = forward(schedule)
    two.ask(3, TASK)
    assert expected(two, blocks) == [2, 1, 0]


def test_blocks_that_were_not_asked_for_are_not_expected(schedule):
    one, blocks = forward(schedule)
    ask_all(one, blocks, [3, 0])
    two, blocks = forward(schedule)
    two.ask(3, TASK)
    assert expected(two, blocks) == [0]


def test_the_least_recently_used_shape_is_forgotten():
    schedule = Schedule(capacity=2)
    for size in (1, 2, 3):
        one, blocks = forward(schedule, sizes=(size, size, size))
        ask_all(one, blocks, [0, 1, 2])
    for size, wanted in ((1, []), (3, [1, 2])):
        two, blocks = forward(schedule, sizes=(size, size, size))
        two.ask(0, TASK)
        assert expected(two, blocks) == wanted


def test_a_guess_is_passed_when_a_later_one_was_asked_for(schedule):
    one, _blocks = forward(schedule)
    one.ask(1, TASK)
    assert one.passed(3)
    assert one.passed(2)
    assert not one.passed(0)


def test_blocks_are_found_by_their_storage_and_root(schedule):
    one, blocks = forward(schedule)
    assert one.blocks_of(blocks[2].source, blocks[2].root()) == [blocks[2]]
    assert one.blocks_of(Storage(), blocks[2].root()) == []
    assert one.blocks_of(blocks[2].source, Root()) == []


def test_of_several_blocks_of_a_storage_the_newest_comes_first(schedule):
    one, (block, *_others) = forward(schedule)
    newer = Block()
    newer.source, newer.storage, newer.root = block.source, block.storage, block.root
    one.add(newer)
    assert one.blocks_of(block.source, block.root()) == [newer, block]


def test_a_storage_with_the_id_of_a_dead_one_has_no_blocks(schedule):
    one, (block, *_others) = forward(schedule)
    other = Storage()
    block.storage = weakref.ref(other)
    assert one.blocks_of(block.source, block.root()) == []


def test_a_pass_wears_out_when_most_of_its_blocks_are_gone(schedule):
    one, (kept, *others) = forward(schedule)
    for _ in others:
        one.forget()
    for _ in range(5000):
        one.add(Block())
        one.forget()
    assert one.worn_out
    assert kept in one.blocks_of(kept.source, kept.root())


def test_dropped_graphs_do_not_add_up_in_a_pass_that_goes_on(schedule):
    one, blocks = forward(schedule)
    for _ in blocks:
        one.forget()
    assert one.signature == Pass(schedule).signature
    assert one.add(Block()) == 0


def test_another_backward_of_the_same_graph_expects_all_again(schedule):
    one, blocks = forward(schedule)
    for at in (3, 2, 1, 0):
        one.ask(at, TASK)
    one.ask(3, TASK + 1)
    assert expected(one, blocks) == [2, 1, 0]


def test_forwards_that_wait_together_are_one_order_and_share_no_block(schedule):
    one, blocks = forward(schedule, (1, 2))
    first = blocks[0]
    assert one.blocks_of(first.source, first.root_itself) == [first]
    one.share_no_more()
    assert one.blocks_of(first.source, first.root_itself) == []
    blocks += [Block(1), Block(2)]
    for block in blocks[2:]:
        one.add(block)
    ask_all(one, blocks, [1, 0, 3, 2])
    again, more = forward(schedule, (1, 2, 1, 2))
    again.ask(1, TASK)
    assert expected(again, more) == [0, 3, 2]
