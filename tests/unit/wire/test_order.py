"""Which messages overtake which: all small cases against a rule that is plainly so."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdag.engine.protocol import (
    ACKNOWLEDGED,
    Assign,
    Call,
    ContextId,
    Forget,
    LeafId,
    Message,
    NewestKey,
    OutputKey,
    Primal,
    Read,
    Reading,
    Settle,
    StepFrame,
    Stepped,
)
from jdag.errors import ProtocolError
from jdag.wire.order import ALL, RULES, Order
from tests.tools.error_texts import fails_with
from tests.tools.wire_cases import messages

X, Y, Z = (ContextId(0, counter, 0) for counter in (1, 2, 3))


@dataclass(eq=False)
class Item:
    message: Any
    name: str


def primal(context: ContextId) -> Message:
    return Primal(context, (1,), "a", (None,))


def call(context: ContextId) -> Message:
    return Call(context, (1,), "f", (), (), (), (), "")


def read(*contexts: ContextId) -> Message:
    keys = [OutputKey(context, (1,), 0) for context in contexts]
    return Read(1, (NewestKey(None, LeafId("b", 1), 0), *keys))


# Name, message, whether it can come in pieces.
KINDS: tuple[tuple[str, Any, bool], ...] = (
    ("x", primal(X), True),
    ("y", primal(Y), True),
    ("read leaf", read(), False),
    ("read x", read(X), False),
    ("read xy", read(X, Y), False),
    ("answer", Reading(1, (None,)), True),
    ("assign", Assign((0, 1), ()), True),
    ("forget", Forget(()), False),
    ("call x", call(X), True),
    ("call y", call(Y), True),
)
OF = {
    "x": "x",
    "y": "y",
    "read leaf": "",
    "read x": "x",
    "read xy": "xy",
    "assign": "all",
    "forget": "all",
    "call x": "x",
    "call y": "y",
}


def in_order(earlier: Item, later: Item) -> bool:
    """Whether the later one has to wait for the earlier one."""
    if earlier.name not in OF or later.name not in OF:
        return False
    one, other = OF[earlier.name], OF[later.name]
    return "all" in (one, other) or any(letter in other for letter in one)


class Naive:
    """What is held, in the order of the link; one goes on when none before it holds."""

    def __init__(self) -> None:
        self.held: list[tuple[Item, bool]] = []

    def step(self, item: Item, whole: bool) -> list[Item]:
        self.held = [(one, is_whole or one is item) for one, is_whole in self.held]
        if all(one is not item for one, _ in self.held):
            self.held.append((item, whole))
        gone: list[Item] = []
        while free := self._free():
            gone.append(free)
            self.held = [(one, w) for one, w in self.held if one is not free]
        return gone

    def _free(self) -> Item | None:
        for place, (item, whole) in enumerate(self.held):
            before = [one for one, _ in self.held[:place]]
            if whole and not any(in_order(one, item) for one in before):
                return item
        return None


Step = tuple[int, bool]  # Which message; whether it is whole then.


def interleavings(
    partial: Sequence[int], length: int, arrived: int = 0, left: tuple[int, ...] = ()
) -> Iterator[list[Step]]:
    """Arrivals in order; of those in pieces the rest later, in any order."""
    if arrived < length:
        is_whole = arrived not in partial
        waiting = left if is_whole else (*left, arrived)
        for more in interleavings(partial, length, arrived + 1, waiting):
            yield [(arrived, is_whole), *more]
    elif not left:
        yield []
    for one in left:
        others = tuple(each for each in left if each != one)
        for more in interleavings(partial, length, arrived, others):
            yield [(one, True), *more]


def held_against(kinds: Sequence[tuple[str, Any, bool]]) -> int:
    count = 0
    may = [number for number, (_, _, pieces) in enumerate(kinds) if pieces]
    for size in range(len(may) + 1):
        for partial in combinations(may, size):
            for steps in interleavings(partial, len(kinds)):
                _hold(kinds, steps)
                count += 1
    return count


def _hold(kinds: Sequence[tuple[str, Any, bool]], steps: list[Step]) -> None:
    items = [Item(message, name) for name, message, _ in kinds]
    order: Order = Order()
    naive, seen = Naive(), []
    out: list[Item] = []
    counted = [item for item in items if type(item.message) in ACKNOWLEDGED]
    for number, whole in steps:
        item = items[number]
        if number in seen:
            ready = list(order.completed(item))
        else:
            ready = list(order.arrived(item, whole))
        seen.append(number)
        expected = naive.step(item, whole)
        told = ([one.name for one in items], steps)
        assert sorted(map(id, ready)) == sorted(map(id, expected)), told
        assert len(order) == len(naive.held), told
        for one in ready:
            assert order.handled == handled_of(counted, out), told
            order.handing(one)
            out.append(one)
        assert order.handled == handled_of(counted, out), told
    places = {id(item): place for place, item in enumerate(out)}
    assert len(places) == len(items)
    for earlier, later in combinations(items, 2):
        if in_order(earlier, later):
            assert places[id(earlier)] < places[id(later)], told


def handled_of(counted: Sequence[Item], out: Sequence[Item]) -> int:
    """The largest n such that the first n that are counted have been handled."""
    waiting = [n for n, item in enumerate(counted) if item not in out]
    return min(waiting, default=len(counted))


def test_all_ways_in_which_three_messages_can_come_are_as_the_naive_rule_says():
    counts = [held_against(kinds) for kinds in product(KINDS, repeat=3)]
    assert sum(counts) > 5_000


@pytest.mark.second
@pytest.mark.parametrize("one", ["y", "call y"])
@pytest.mark.parametrize("other", ["x", "call x"])
def test_all_ways_in_which_four_of_two_contexts_and_a_leaf_can_come_are_as_well(
    one: str, other: str
):
    names = (other, one, "read xy", "assign")
    few = [kind for kind in KINDS if kind[0] in names]
    assert sum(held_against(kinds) for kinds in product(few, repeat=4)) > 10_000


def test_every_message_has_a_rule():
    assert set(RULES) == set(get_args(Message))


@pytest.mark.parametrize("kind", messages, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=20)
def test_each_message_is_in_order_with_its_context_or_with_all_or_with_none(
    kind: type[Any], data: st.DataObject
):
    message: Any = data.draw(messages[kind])
    lanes = RULES[kind](message)
    match message:
        case Assign() | Forget() | StepFrame(begins=True) | Settle():
            assert lanes is ALL
        case Reading() | StepFrame() | Stepped():
            assert lanes == ()
        case Read(keys=keys):
            actual = [key.context for key in keys if key.context is not None]
            assert lanes == ("leaves",) if not actual else set(lanes) == set(actual)
            assert len(lanes) == len(set(lanes))
        case _:
            assert lanes == (message.context,)


def large(context: ContextId) -> Item:
    return Item(primal(context), "large")


def test_no_more_are_held_than_may_be():
    order: Order = Order(held_max=2)
    first, second = large(X), large(Y)
    order.arrived(first, whole=False)
    order.arrived(second, whole=False)
    other = large(Z)
    with fails_with(ProtocolError, "wire.too_many_messages_wait"):
        order.arrived(other, whole=False)
    assert list(order.completed(second)) == [second]
    assert list(order.arrived(other, whole=False)) == []
    assert list(order.completed(first)) == [first]


def test_a_handled_item_is_not_taken_for_a_later_one_with_its_id():
    order: Order = Order()
    first = Item(call(X), "first")
    assert not order.arrived(first, whole=False)
    ids = _handled(order, 100)
    assert order.handled == 0
    assert order.completed(first) == [first]
    order.handing(first)
    assert order.handled == 101
    assert ids & _handled(order, 100)
    assert order.handled == 201


def _handled(order: Order, count: int) -> set[int]:
    items = [Item(call(Y), "later") for _ in range(count)]
    for item in items:
        order.handing(*order.arrived(item, whole=True))
    return set(map(id, items))


def test_an_item_that_has_been_handled_is_not_kept_until_it_is_counted():
    order: Order = Order()
    order.arrived(Item(call(X), "first"), whole=False)
    item = Item(call(Y), "later")
    kept = weakref.ref(item)
    order.handing(*order.arrived(item, whole=True))
    del item
    assert kept() is None and order.handled == 0


def test_a_message_that_is_not_acknowledged_is_not_counted():
    order: Order = Order()
    for message in (primal(X), read(X), Forget(()), StepFrame(X, 1, (), 0, True)):
        order.handing(Item(message, "other"))
    assert order.handled == 0
