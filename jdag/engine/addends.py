"""The order in which addends are summed: a tree over their places.

Up to eight addends are summed from left to right. Of more, each eight neighbours are
summed to one, again and again until at most eight are left.

Invariants
- A place is the rank of an addend, in program order, among all that are expected. The
  tree depends on the number of places alone, never on the order of arrival.
- Recvs and leaves sum as addends arrive. The place of a symbolic zero stays empty there
  and moves no other. A sum of one addend is that addend; a sum of none is again an
  empty place. Of addends in order, or in reverse order, at most eight of each level
  wait, so that their number grows with the logarithm of the places.
- A vjp, or a hook on a call's output, sums what came once all is there: its places are
  those of the addends that are no zeros.
- FAST expects zeros for slots of transfers that no root needs, SMART does not. So with
  such slots, and more than eight addends, the two modes may have different trees.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from jdag.engine.names import Key

# So many are summed at once, also by the machine: its bits may depend on that.
ADDENDS_MAX = 8

# Path of the consumer and position there; then the key of the value.
AddendEdge = tuple[tuple[float, ...], int]
Addend = tuple[tuple[float, ...], int, Key]
# A level of the tree (0: addends), and a place there.
Spot = tuple[int, int]
_T = TypeVar("_T")


def top(places: Sequence[_T | None], add: Callable[[Sequence[_T]], _T]) -> list[_T]:
    """Return the at most eight sums at the top of the tree; None is an empty place.

    `add` is called with two to eight neighbours, and returns their sum.
    """
    while len(places) > ADDENDS_MAX:
        sums: list[_T | None] = []
        for start in range(0, len(places), ADDENDS_MAX):
            group = places[start : start + ADDENDS_MAX]
            came = [one for one in group if one is not None]
            sums.append(add(came) if len(came) > 1 else next(iter(came), None))
        places = sums
    return [one for one in places if one is not None]


class Tree(Struct, eq=False):
    """The same tree while addends arrive: which sums can be made, and what waits."""

    sizes: list[int]  # The number of places of each level, down to at most eight.
    ranks: dict[AddendEdge, int]
    addends: list[Addend]  # The sums at the top, in the form of addends.
    groups: dict[Spot, dict[int, Key | None]] = {}  # Incomplete ones, by their sum.

    def put(self, spot: Spot, key: Key | None) -> tuple[Spot, tuple[Key, ...]] | None:
        """Put an addend, or a sum, in its place; None leaves that empty.

        Returns:
            The place of a sum that can be made now, and its addends.
        """
        level, at = spot
        while level + 1 < len(self.sizes):
            above = level + 1, at // ADDENDS_MAX
            group = self.groups.setdefault(above, {})
            group[at] = key
            left = self.sizes[level] - above[1] * ADDENDS_MAX
            if len(group) < min(left, ADDENDS_MAX):
                return None
            del self.groups[above]
            keys = tuple([group[at] for at in sorted(group)])
            came = tuple([key for key in keys if key is not None])
            if len(came) > 1:
                return above, came
            key, (level, at) = next(iter(came), None), above
        if key is not None:
            self.addends.append(((at,), 0, key))
        return None

    def waiting(self) -> list[Key]:
        """The keys of what waits below the top."""
        groups = self.groups.values()
        return [key for group in groups for key in group.values() if key is not None]


def addend_tree(edges: Sequence[AddendEdge], addends: list[Addend]) -> Tree:
    """Return the tree of these edges, whose top is put into `addends`."""
    sizes = [len(edges)]
    while sizes[-1] > ADDENDS_MAX:
        sizes.append(-(-sizes[-1] // ADDENDS_MAX))
    return Tree(sizes, {edge: at for at, edge in enumerate(sorted(edges))}, addends)
