"""What a run is asked for, checked before it begins."""

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from jdag.engine.vocabulary import WORKERS_MAX, is_name
from jdag.errors import ScenarioError, unusable
from jdag.runtime.tables import NS, is_listed, is_ns
from jdag.sim.carriage import gives_up_ns, link_settings
from jdag.sim.faults import Crash, Fault, Partition
from jdag.sim.network import LinkModel, Network
from jdag.wire.link import LinkSettings

WORKERS = (
    "a list of one name or more, none empty, none twice, none with a # or a sign that "
    f"is not printed; at most {WORKERS_MAX:,}"
)


def checked_workers(workers: Sequence[str], home: str, seed: int) -> tuple[str, ...]:
    """The workers' names, if they are usable and home is one of them.

    Raises:
        ScenarioError: names what is not, its value and what is allowed.
    """
    names = tuple(workers) if is_listed(workers) else ()
    usable = 1 <= len(names) <= WORKERS_MAX and all(map(is_name, names))
    if not usable or len(dict.fromkeys(names)) != len(names):
        raise ScenarioError(unusable("workers", workers, WORKERS))
    if not isinstance(home, str) or home not in names:
        raise ScenarioError(unusable("home", home, "one of " + ", ".join(names)))
    if type(seed) is not int or seed < 0:  # Of -1 and 1 the same is drawn.
        raise ScenarioError(unusable("seed", seed, "an integer >= 0"))
    return names


def checked_faults(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """What goes wrong, if it is a list.

    Raises:
        ScenarioError: it is not; names it.
    """
    if not is_listed(faults):
        allowed = "a list of jdag.sim's faults, such as [jdag.sim.Drop(0.1)]"
        raise ScenarioError(unusable("faults", faults, allowed))
    return tuple(faults)


def check_run(link: LinkSettings | None, events_max: int, trace: bool) -> None:
    """Refuse what is of another type than a run needs.

    Raises:
        ScenarioError: names the setting, its value and what is allowed.
    """
    if not isinstance(link, LinkSettings | None):
        raise ScenarioError(unusable("link", link, "a LinkSettings, or None"))
    if type(events_max) is not int or events_max < 1:
        raise ScenarioError(unusable("events_max", events_max, "an integer >= 1"))
    if type(trace) is not bool:
        raise ScenarioError(unusable("trace", trace, "True or False"))


def check_crashes(faults: Sequence[Fault], home: str, trace: bool) -> None:
    """Refuse a crash of home, and one by place in a trace that is not kept.

    Raises:
        ScenarioError: names the fault, its value and what is allowed.
    """
    for index, fault in enumerate(faults):
        if not isinstance(fault, Crash):
            continue
        key = f"faults[{index}]"
        if fault.worker == home:
            allowed = "a worker other than home, where the main program runs"
            raise ScenarioError(unusable(f"{key}.worker", home, allowed))
        if fault.at_index is not None and not trace:
            allowed = "at_ns in its place, as no trace is kept"
            raise ScenarioError(unusable(f"{key}.at_index", fault.at_index, allowed))


def checked_ns(key: str, value: int) -> int:
    """A time in nanoseconds, if it is one.

    Raises:
        ScenarioError: it is not; names it.
    """
    if not is_ns(value):
        raise ScenarioError(unusable(key, value, NS))
    return value


def network_of(network: Network | LinkModel | None) -> Network:
    """A network as it is, or of one model for all links, or (None) of free ones."""
    if isinstance(network, Network):
        return network
    if not isinstance(network, LinkModel | None):
        raise ScenarioError(unusable("network", network, "a Network or a LinkModel"))
    return Network(LinkModel() if network is None else network)


def partings(
    faults: Sequence[Fault],
    network: Network,
    link: LinkSettings | None,
    since_ns: int = 0,
) -> Iterator[tuple[int, str, str]]:
    """When who will notice, for want of any sign of life, that whom is out of reach.

    Of those who try since a time, and did not try before.

    A partition that lasts twice as long as a link tries parts each pair across it, as
    keepalives would: two that have nothing to say might else wait for ever, each for
    what the other waits for from a third.
    """
    for fault in faults:
        if not isinstance(fault, Partition):
            continue
        for here, there in permutations(fault.groups, 2):
            for worker, peer in product(here, there):
                models = network.model(worker, peer), network.model(peer, worker)
                settings = link or link_settings(*models)
                from_ns = max(fault.from_ns, since_ns)
                at_ns = from_ns + 2 * gives_up_ns(settings)
                if fault.until_ns is None or at_ns < fault.until_ns:
                    yield at_ns, worker, peer
