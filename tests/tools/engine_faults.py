"""Random programs that something happens to, and what must hold afterwards."""

import random

from jdag.errors import JdagError
from tests.tools.engine_net import Net
from tests.tools.engine_outages import newest
from tests.tools.engine_programs import Broken, Run, drawn
from tests.tools.engine_values import Fuse
from tests.tools.random_features import all_steps
from tests.tools.random_functions import Hook
from tests.tools.random_programs import Call, Invoke, Move, Plan

STEPS_MAX = 600  # Beyond most runs: some faults come too late to be noticed.

FAULTS = (
    "forward", "vjp", "hook", "program", "abandon", "expired", "crash", "two crashes",
    "restart", "two restarts", "partition",
)  # fmt: skip

_RESTARTS = ("restart", "two restarts")


class Abandoned(Exception):
    """The top program stops here, whatever it waits for."""


def happen(fault: str, seed: int) -> str:
    """Run a program to which `fault` happens, and a good one after it.

    Returns: how it went. Raises: AssertionError: a worker that lives has something
    left, or the good program's gradients are not the oracle's.
    """
    rng = random.Random(f"{fault} {seed}")
    plan = drawn(seed)
    fuses, raises = _sabotage(plan, fault, rng)
    net, home = Net(plan.workers, rng), plan.home
    _arm(net, home, fault, rng)
    run: Run | None = None
    outcome = "untouched"
    try:
        run = Run(plan, net, None, fuses, raises)
        run.timeout_ns = 1 if fault == "expired" else None
        run.all()
    except (Abandoned, Broken, JdagError) as error:
        outcome = type(error).__name__
    net.before_step = None
    if home not in net.dead:
        if run is not None:
            run.scope.leave()
        net.drain()
        assert (left := net.leftovers()) == [], left
    elif fault in _RESTARTS:
        net.drain()
    if home not in net.dead or fault in _RESTARTS:
        _good(net, seed + 1)
    net.drain()
    assert (left := net.leftovers()) == [], left
    return outcome


def _good(net: Net, seed: int) -> None:
    apart = [max(pair) for pair in net.parted]
    alive = tuple(name for name in net.alive if name not in apart)
    run = Run(drawn(seed, alive), net)
    run.all()
    assert run.scope.leave() == ()


def _arm(net: Net, home: str, fault: str, rng: random.Random) -> None:
    at = int(rng.random() ** 2 * STEPS_MAX)
    victims = [rng.choice(net.workers), rng.choice(net.workers)]
    del victims[2 if fault.startswith("two") else 1 :]

    def abandon(net: Net) -> None:
        if net.steps >= at:
            net.before_step = None
            raise Abandoned

    def crash(net: Net) -> None:
        if net.steps >= at and victims:
            victim = victims.pop()
            if victim not in net.dead:
                net.crash(victim)
            if home in net.dead:
                net.before_step = None
                raise Abandoned

    def restart(net: Net) -> None:
        if net.steps < at or not victims or rng.random() < 0.9:
            return
        last = newest(net, victims[-1])
        if last not in net.dead:
            net.crash(last)
            if rng.random() < 0.7 and last != home:
                return
        net.rejoin(victims.pop())
        net.before_step = None
        _good(net, rng.randrange(1_000))
        net.before_step = restart
        if last == home:
            raise Abandoned

    def part(net: Net) -> None:
        if net.steps >= at:
            net.before_step = None
            one, other = rng.sample(net.workers, 2)
            net.part(one, other)

    def ring(net: Net) -> None:
        if rng.random() < 0.03:
            net.ring(home)

    if fault == "abandon":
        net.before_step = abandon
    elif fault == "expired":
        net.before_step = ring
    elif fault == "partition" and len(net.workers) > 1:
        net.before_step = part
    elif fault in ("crash", "two crashes"):
        net.before_step = crash
    elif fault in _RESTARTS:
        net.before_step = restart


def _sabotage(
    plan: Plan, fault: str, rng: random.Random
) -> tuple[dict[int, Fuse], dict[int, int]]:
    fuses: dict[int, Fuse] = {}
    raises: dict[int, int] = {}
    for _, step in all_steps(plan.steps):
        match step:
            case Call() | Move() if fault in ("forward", "vjp") and rng.random() < 0.15:
                fuses[step.id] = Fuse(fault, rng.choice((1, 1_000_000)))
            case Hook() if fault == "hook" and rng.random() < 0.3:
                fuses[step.id] = Fuse(fault, rng.choice((1, 1_000_000)))
            case Invoke() if fault == "program" and rng.random() < 0.5:
                raises[step.id] = rng.randint(0, len(step.body.steps))
            case _:
                pass
    return fuses, raises
