"""Routes between replicas: which replica sends to which, and which part of the arrays.

There are three ways, by the name that `ctx.replicate` and `ctx.all_reduce` take:

- "owner": whoever has the arrays sends them to each replica, and adds up what comes
  back, in the order of the replicas. For `all_reduce` that is the first worker.
- "tree": a binary tree of replicas below the owner. Each adds its own first, then what
  the two below it bring. No worker has more than two below it.
- "ring": as many parts as replicas. Part c goes from the owner to replica c and then
  around; what comes back is added from the last replica that it reached to the first
  (reduce-scatter), and the owner gathers the parts. In `all_reduce` part c is added
  from replica c + 1 around to c, then handed on from c around (all-gather): each worker
  sends to the next alone, 2 (n - 1) / n of the bytes of the arrays.

Each route is a tree over the replicas, numbered from 0. What starts at its root is
handed on to all; sums go the other way. So order is a matter of the route alone, never
of what arrives first.
"""

from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from jdag.errors import JdagError

How = Literal["owner", "tree", "ring"]
HOW: tuple[How, ...] = get_args(How)


class Route(NamedTuple):
    """A tree over replicas.

    `order` has every replica, parents before their children; `parents` has for each
    replica the one that hands on to it, None where that is the source itself.
    """

    order: tuple[int, ...]
    parents: tuple[int | None, ...]

    def children(self, replica: int | None) -> tuple[int, ...]:
        """The replicas that a replica, or the source, sends to, in order."""
        return tuple([one for one in self.order if self.parents[one] == replica])


def check_how(how: object) -> None:
    """Raise JdagError unless there are such routes."""
    if not isinstance(how, str) or how not in HOW:
        raise JdagError(f"how={how!r}: allowed are {', '.join(map(repr, HOW))}")


def routes_from(source: int | None, count: int, how: How) -> tuple[Route, ...]:
    """Return the routes from one worker to all replicas.

    `source` is the replica that is where the source is; None if it is elsewhere.
    """
    if how == "owner":
        return (Route(tuple(range(count)), (None,) * count),)
    if how == "tree":
        return (_tree(source, count),)
    return tuple([_chain(first, count, 1) for first in range(count)])


def routes_up(count: int, how: How) -> tuple[Route, ...]:
    """Return the routes along which sums go to their roots, as `routes_among` has them.

    Around a ring part c starts at replica c + 1 and ends at c, where it is complete.
    """
    if how == "ring":
        return tuple([_chain(last, count, -1) for last in range(count)])
    return routes_among(count, how)


def routes_among(count: int, how: How) -> tuple[Route, ...]:
    """Return the routes on which replicas hand on: from the first, or around a ring."""
    if how == "owner":
        return (Route(tuple(range(count)), (None, *(0,) * (count - 1))),)
    return routes_from(0, count, how)


def _tree(source: int | None, count: int) -> Route:
    """A heap: node n, 0 at the root, has the children 2 n + 1 and 2 n + 2."""
    others = [replica for replica in range(count) if replica != source]
    nodes = [source, *others]
    parents: list[int | None] = [None] * count
    for number, replica in enumerate(others, 1):
        parents[replica] = nodes[(number - 1) // 2]
    order = others if source is None else [source, *others]
    return Route(tuple(order), tuple(parents))


def _chain(first: int, count: int, step: int) -> Route:
    order = tuple([(first + step * number) % count for number in range(count)])
    parents: list[int | None] = [None] * count
    for before, after in pairwise(order):
        parents[after] = before
    return Route(order, tuple(parents))
