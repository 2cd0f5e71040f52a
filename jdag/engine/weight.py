"""Weights: how the owner of a pass learns that nothing of it goes on anywhere.

A pass begins with one weight, which its owner holds. Whoever has something of the pass
to do holds a part of it, every message of the pass carries a part, and whoever has
nothing left to do gives its part away: to the messages that it sends in that moment,
or, if there are none, straight back to the owner. Nobody climbs a tree of senders, and
most messages need no answer (F. Mattern, "Global quiescence detection based on credit
distribution and recovery", 1989, whose credit this is).

Why the owner knows, when it has nothing to do and holds the whole: parts are only split
and added, exactly, so they always sum to the whole; a worker that is busy holds more
than nothing, and so does a message under way; hence nobody is busy and nothing is under
way. Why it comes to that: a worker that is not busy holds nothing once it has handled
an event, so the parts are with the busy, under way, or home; what is recorded is
finite, each edge brings one contribution and each slot is marked once, so the busy
come to an end and messages do too.

A part is a whole number of units, each one of the whole halved some times. What is
split in a fan-out comes together again where it joins, so that numbers stay short; in
the worst case they grow by a bit with each fan-out between the root and here. Beyond 63
bits they are bytes, since that is how they travel.

The change in the count of owed sends goes wherever weight goes: who gives all its
weight away gives the change too. So when the owner holds the whole it knows the sum.
"""

from typing import Annotated

from msgspec import Meta

from jdag.engine.names import Record

HALVINGS_MAX = 1 << 20
UNITS_MAX_BYTES = 1 << 16
_SMALL = 1 << 63

Units = (
    Annotated[int, Meta(ge=0, le=_SMALL - 1)]
    | Annotated[bytes, Meta(min_length=8, max_length=UNITS_MAX_BYTES)]
)


class Weight(Record, gc=False):
    """A part of a pass: `units` of the whole halved `halvings` times."""

    units: Units
    halvings: Annotated[int, Meta(ge=0, le=HALVINGS_MAX)]


def units_of(weight: Weight) -> int:
    """The units of a weight, however many bits they have."""
    units = weight.units
    return units if isinstance(units, int) else int.from_bytes(units, "little")


def weight_of(units: int, halvings: int) -> Weight:
    """A weight of so many units."""
    if units < _SMALL:
        return Weight(units, halvings)
    return Weight(units.to_bytes((units.bit_length() + 7) >> 3, "little"), halvings)


NOTHING = Weight(0, 0)
WHOLE = Weight(1, 0)


def added(one: Weight, other: Weight) -> Weight:
    """The sum of two parts, in as few bits as there are."""
    if not one.units:
        return other
    halvings = max(one.halvings, other.halvings)
    units = units_of(one) << halvings - one.halvings
    units += units_of(other) << halvings - other.halvings
    even = min((units & -units).bit_length() - 1, halvings)
    return weight_of(units >> even, halvings - even)


def split(weight: Weight, count: int) -> list[Weight]:
    """So many parts, each more than nothing, that sum to this weight."""
    assert weight.units and count, (weight, count)
    if count == 1:
        return [weight]
    more = (count - 1).bit_length()
    each, left = divmod(units_of(weight) << more, count)
    halvings = weight.halvings + more
    return [weight_of(each + left, halvings)] + [weight_of(each, halvings)] * (
        count - 1
    )
