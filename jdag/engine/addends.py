"""The order in which addends are summed: a tree over their positions.

Up to eight addends are summed from left to right. More addends are summed in groups of
eight neighbours, level by level, until at most eight sums remain.

Invariants
- The position of an addend is its rank, in program order, among all expected addends.
  The tree depends only on the number of positions, never on the order of arrival.
- Recvs and leaves sum addends as they arrive. A symbolic zero leaves its position
  empty. A group with one addend passes it on; a group without addends is an empty
  position of the next level. If addends arrive in order, or in reverse order, at most
  eight per level wait, so memory grows with the logarithm of their number.
- A vjp, or a hook on the output of a call, sums once all addends have arrived: symbolic
  zeros have no position there.
- FAST expects zeros for slots of transfers that no root needs, SMART does not. With
  such slots and more than eight addends, the two modes may have different trees.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from jdag.engine.names import Key

# Maximal number of addends of a sum, also in `jdag.compute`. It affects the bits.
ADDENDS_MAX = 8

# An edge: the consumer's path and a position in its inputs. An addend also has a key.
AddendEdge = tuple[tuple[float, ...], int]
Addend = tuple[tuple[float, ...], int, Key]
# A level of the tree (level 0 holds the addends) and a position in that level.
Spot = tuple[int, int]
_T = TypeVar("_T")


def top(places: Sequence[_T | None], add: Callable[[Sequence[_T]], _T]) -> list[_T]:
    """Add groups until at most eight sums are left. None is an empty position."""
    while len(places) > ADDENDS_MAX:
        sums: list[_T | None] = []
        for start in range(0, len(places), ADDENDS_MAX):
            group = places[start : start + ADDENDS_MAX]
            present = [addend for addend in group if addend is not None]
            sums.append(add(present) if len(present) > 1 else next(iter(present), None))
        places = sums
    return [addend for addend in places if addend is not None]


class Tree(Struct, eq=False):
    """The tree while addends arrive. Incomplete groups wait for more addends."""

    sizes: list[int]  # Positions per level, at most eight in the last level.
    ranks: dict[AddendEdge, int]
    addends: list[Addend]  # The sums at the top, in the form of addends.
    groups: dict[Spot, dict[int, Key | None]] = {}  # Incomplete groups, by sum.

    def put(self, spot: Spot, key: Key | None) -> tuple[Spot, tuple[Key, ...]] | None:
        """Store an addend or a sum. A `key` of None is a symbolic zero.

        Returns:
            The spot of the sum and its addends if this completes a group, else None.
        """
        level, position = spot
        while level + 1 < len(self.sizes):
            above = level + 1, position // ADDENDS_MAX
            group = self.groups.setdefault(above, {})
            group[position] = key
            group_size = self.sizes[level] - above[1] * ADDENDS_MAX
            if len(group) < min(group_size, ADDENDS_MAX):
                return None
            del self.groups[above]
            keys = tuple([key for _, key in sorted(group.items()) if key is not None])
            if len(keys) > 1:
                return above, keys
            key, (level, position) = next(iter(keys), None), above
        if key is not None:
            self.addends.append(((position,), 0, key))
        return None

    def waiting(self) -> list[Key]:
        groups = self.groups.values()
        return [key for group in groups for key in group.values() if key is not None]


def addend_tree(edges: Sequence[AddendEdge], addends: list[Addend]) -> Tree:
    sizes = [len(edges)]
    while sizes[-1] > ADDENDS_MAX:
        sizes.append(-(-sizes[-1] // ADDENDS_MAX))
    return Tree(sizes, {edge: rank for rank, edge in enumerate(sorted(edges))}, addends)
