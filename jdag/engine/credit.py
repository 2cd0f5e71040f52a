"""Credit: how the owner of a pass detects that all workers are passive.

A pass begins with one credit, held by its owner. Every worker with work to do for the
pass holds a part of it, and every message of the pass carries a part. A worker that
becomes passive gives its part away: to the messages that it sends at that moment or, if
there are none, straight back to the owner. No tree of senders is needed, and most
messages need no answer (F. Mattern, "Global quiescence detection based on credit
distribution and recovery", 1989).

Safety: when the owner is passive and holds the whole credit, the pass is over. Parts
are only split and added, exactly, so they always sum to the whole. A busy worker and a
message in flight each hold more than nothing, so there are none left. Liveness: this
state is reached. A worker that is not busy holds nothing once it has handled an event.
What is recorded is finite, each edge delivers one contribution and each slot is marked
once, so workers become passive and messages end.

A part is a whole number of units; a unit is the whole halved some number of times. What
is split in a fan-out is added again where the branches join, so numbers stay short; in
the worst case they grow by a bit with each fan-out between the root and here. Beyond 63
bits they are stored as bytes, the form in which they travel.

A change in the number of owed sends travels with credit: a worker that gives all its
credit away also gives the change. So an owner that holds the whole knows the sum.
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


class Credit(Record, gc=False):
    """A part of a pass's credit: `units` of the whole halved `halvings` times."""

    units: Units
    halvings: Annotated[int, Meta(ge=0, le=HALVINGS_MAX)]


def units_of(credit: Credit) -> int:
    """The units of a credit as an int of any size."""
    units = credit.units
    return units if isinstance(units, int) else int.from_bytes(units, "little")


def credit_of(units: int, halvings: int) -> Credit:
    """A credit of this many units."""
    if units < _SMALL:
        return Credit(units, halvings)
    return Credit(units.to_bytes((units.bit_length() + 7) >> 3, "little"), halvings)


NOTHING = Credit(0, 0)
WHOLE = Credit(1, 0)


def credit_sum(one: Credit, other: Credit) -> Credit:
    """The sum of two parts, reduced to the fewest bits."""
    if not one.units:
        return other
    halvings = max(one.halvings, other.halvings)
    units = units_of(one) << halvings - one.halvings
    units += units_of(other) << halvings - other.halvings
    even = min((units & -units).bit_length() - 1, halvings)
    return credit_of(units >> even, halvings - even)


def split_credit(credit: Credit, count: int) -> list[Credit]:
    """Split a credit into `count` parts, each more than nothing."""
    assert credit.units and count, (credit, count)
    if count == 1:
        return [credit]
    more = (count - 1).bit_length()
    each, left = divmod(units_of(credit) << more, count)
    halvings = credit.halvings + more
    return [credit_of(each + left, halvings)] + [credit_of(each, halvings)] * (
        count - 1
    )
