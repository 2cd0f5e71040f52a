"""What tests of engines say often: a net, what it holds back, a pass that finishes."""

import random
from typing import Any

from msgspec.structs import replace

from jdag.engine.protocol import Argument, Key, NewestKey, Outcome
from tests.tools.engine_net import Net, Scope, names
from tests.tools.engine_values import Linear

SEEDS = range(20)


def net_of(count: int, seed: int = 0) -> Net:
    """Workers a, b, c, ... and an order of events."""
    return Net(names(count), random.Random(seed))


def begun(count: int, owners: str, seed: int = 0, first: int = 3) -> Any:
    """Return a net, a context of a, and leaves of these workers: 3, 4, 5, ..."""
    net = net_of(count, seed)
    leaves = [net.put(owner, first + n, "a") for n, owner in enumerate(owners)]
    return net, net.open("a"), *leaves


def nothing_left(net: Net) -> None:
    """Hold back no more, and let all happen: no worker has anything left."""
    net.let_go()
    net.drain()
    assert (left := net.leftovers()) == [], left


def leaves_nothing(scope: Scope) -> None:
    """Leave a context, whose net then has nothing left."""
    scope.leave()
    nothing_left(scope.net)


def holding(kind: type, sender: str = "", receiver: str = "") -> Any:
    """Hold back messages of a kind, from a worker, to a worker."""
    return lambda a, b, message: (
        type(message) is kind and sender in ("", a) and receiver in ("", b)
    )


def pausing(kind: str) -> Any:
    """Hold back the forward of the functions of this name."""
    return lambda _, job: getattr(getattr(job, "function", None), "name", "") == kind


def kept(net: Net, kind: str) -> list[Key]:
    """Which values of a kind are held anywhere."""
    return [k for place in net.places.values() for k in place.values if k.kind == kind]


def finished(scope: Scope, *roots: Argument, **settings: Any) -> int:
    """Run a pass that finishes; its number."""
    result = scope.backward(*roots, **settings)
    assert result.outcome is Outcome.FINISHED, result
    return result.number


def newest(leaf: Argument) -> Argument:
    """A leaf as whichever version of it is the newest when its owner is asked."""
    return replace(leaf, key=NewestKey(None, leaf.key.name, 0))


def assign_newest(
    net: Net, issuer: str, leaf: Argument, function: Linear, *inputs: Argument
) -> None:
    """Have the next version of a leaf made, whichever that is then."""
    net.assign(issuer, leaf.owner, function, inputs, newest(leaf).key)
