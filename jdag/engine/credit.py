"""Credit: how the owner of a pass detects that all workers are passive.

A pass begins with one credit, held by its owner. Every worker with work to do for the
pass holds a part of it, and every message of the pass carries a part. A worker that
becomes passive gives its part away: to the messages that it sends at that moment or, if
there are none, to the owner. No tree of senders is needed, and most messages need no
answer (F. Mattern, "Global quiescence detection based on credit distribution and
recovery", 1989).

Safety: when the owner is passive and holds the full credit, the pass is over. Parts are
only split and added, exactly, so their sum is always the full credit. Each busy worker
and each message in flight holds a positive part, so none of them exists then. Liveness:
this state is reached. A worker that is not busy holds no credit after it has handled an
event. The graph is finite, each edge delivers one contribution and each slot is marked
once, so workers become passive and messages end.

A part is an integer number of units; a unit is the full credit, halved some number of
times. Parts that were split in a fan-out are added where the branches join, so the
integers stay short; in the worst case they grow by one bit per fan-out between the root
and this worker. Integers of more than 63 bits are stored, and sent, as bytes.

The change in the number of owed sends (sends that wait for a cotangent) is sent with
credit: a worker that gives all its credit away also reports its change. So an owner
with the full credit knows the sum.
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
    """A part of a pass's credit: `units / 2**halvings` of the full credit."""

    units: Units
    halvings: Annotated[int, Meta(ge=0, le=HALVINGS_MAX)]


def units_of(credit: Credit) -> int:
    units = credit.units
    return units if isinstance(units, int) else int.from_bytes(units, "little")


def credit_of(units: int, halvings: int) -> Credit:
    if units < _SMALL:
        return Credit(units, halvings)
    return Credit(units.to_bytes((units.bit_length() + 7) >> 3, "little"), halvings)


NOTHING = Credit(0, 0)
WHOLE = Credit(1, 0)


def credit_sum(a: Credit, b: Credit) -> Credit:
    if not a.units:
        return b
    halvings = max(a.halvings, b.halvings)
    units = units_of(a) << halvings - a.halvings
    units += units_of(b) << halvings - b.halvings
    even = min((units & -units).bit_length() - 1, halvings)
    return credit_of(units >> even, halvings - even)


def split_credit(credit: Credit, count: int) -> list[Credit]:
    assert credit.units and count, (credit, count)
    if count == 1:
        return [credit]
    more = (count - 1).bit_length()
    units, remainder = divmod(units_of(credit) << more, count)
    halvings = credit.halvings + more
    rest = [credit_of(units, halvings)] * (count - 1)
    return [credit_of(units + remainder, halvings), *rest]
