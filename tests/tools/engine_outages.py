"""Workers of a net that crash, join again, or lose each other; others hear in time."""

from typing import TYPE_CHECKING

from jdag.engine import Engine
from jdag.engine.protocol import Joined, Lost, incarnated, incarnation_of, named
from tests.tools.engine_parts import Place

if TYPE_CHECKING:
    from tests.tools.engine_net import Net


def start(net: "Net", name: str, incarnation: int) -> str:
    worker = incarnated(name, incarnation)
    net.places[worker] = Place(Engine(name, net.workers, incarnation))
    return worker


def crash(net: "Net", worker: str) -> None:
    net.dead[worker] = None
    place = net.places[worker]
    for pair, queue in net.queues.items():
        if pair[1] == worker:
            queue.clear()
            net.links.forget(pair)
        elif pair[0] == worker:
            while queue and net.rng.random() < 0.5:
                queue.pop()
    place.values.clear()
    place.jobs.clear()
    place.spawned.clear()
    place.running.clear()
    net.unnoticed = [notice for notice in net.unnoticed if notice[0] != worker]
    net.unnoticed.extend((name, Lost(worker)) for name in net.alive)


def hear(net: "Net", worker: str, notice: Lost | Joined) -> None:
    joined = net.places[worker].joined
    if isinstance(notice, Joined):
        joined[notice.name] = max(notice.incarnation, joined.get(notice.name, 0))
    else:
        net.links.forget((notice.worker, worker))
    net.tell(worker, notice)


def rejoin(net: "Net", name: str) -> str:
    """A worker that crashed takes part again; others hear of it in their time.

    Those who have not heard of the loss by then hear of either first. Who joins knows
    at once which others there are, and which of them are not any more.
    """
    last = newest(net, name)
    assert last in net.dead, last
    number = incarnation_of(last) + 1
    net.unnoticed.extend((other, Joined(name, number)) for other in net.alive)
    worker = start(net, name, number)
    for other in net.places:
        if named(other) != name and incarnation_of(other):
            net.tell(worker, Joined(named(other), incarnation_of(other)))
    for other in net.dead:
        net.tell(worker, Lost(other))
    return worker


def newest(net: "Net", name: str) -> str:
    return max((w for w in net.places if named(w) == name), key=incarnation_of)


def part(net: "Net", one: str, other: str) -> None:
    for here, there in ((one, other), (other, one)):
        net.parted[here, there] = None
        net.queues.pop((here, there), None)
        net.links.forget((here, there))
        net.unnoticed.append((here, Lost(there)))


def known(net: "Net", worker: str, name: str) -> str:
    """Which incarnation of a worker another one has heard of, as programs there see it.

    A name that is one of an incarnation is that.
    """
    if named(name) != name:
        return name
    return incarnated(name, net.places[worker].joined.get(name, 0))
