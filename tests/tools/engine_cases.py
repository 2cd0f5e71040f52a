"""What tests of engines say often: a net, what it holds back, a pass that finishes."""

import random
from typing import Any

from msgspec.structs import replace

from jdag.engine.protocol import Argument, Key, NewestKey, Outcome
from tests.tools.engine_net import Net, Scope, names
from tests.tools.engine_values import Linear

SEEDS = range(20)


def net_of(count: int, seed: int = 0) -> Net:
    return Net(names(count), random.Random(seed))


def begun(count: int, owners: str, seed: int = 0, first: int = 3) -> Any:
    """Return a net, a context of a, and leaves of these workers: 3, 4, 5, ..."""
    net = net_of(count, seed)
    leaves = [net.put(owner, first + n, "a") for n, owner in enumerate(owners)]
    return net, net.open("a"), *leaves


def nothing_left(net: Net) -> None:
    net.let_go()
    net.drain()
    assert (left := net.leftovers()) == [], left


def leaves_nothing(scope: Scope) -> None:
    scope.leave()
    nothing_left(scope.net)


def holding(kind: type, sender: str = "", receiver: str = "") -> Any:
    return lambda a, b, message: (
        type(message) is kind and sender in ("", a) and receiver in ("", b)
    )


def pausing(kind: str) -> Any:
    return lambda _, job: getattr(getattr(job, "function", None), "name", "") == kind


def kept(net: Net, kind: str) -> list[Key]:
    return [k for place in net.places.values() for k in place.values if k.kind == kind]


def finished(scope: Scope, *roots: Argument, **settings: Any) -> int:
    result = scope.backward(*roots, **settings)
    assert result.outcome is Outcome.FINISHED, result
    return result.number


def newest(leaf: Argument) -> Argument:
    return replace(leaf, key=NewestKey(None, leaf.key.name, 0))


def assign_newest(
    net: Net, issuer: str, leaf: Argument, function: Linear, *inputs: Argument
) -> None:
    net.assign(issuer, leaf.owner, function, inputs, newest(leaf).key)
