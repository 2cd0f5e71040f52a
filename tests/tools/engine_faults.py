"""Random programs that something happens to, and what must hold afterwards."""

import random
from collections.abc import Sequence
from dataclasses import replace

from jdag.errors import JdagError
from tests.tools.engine_hooks import with_hooks
from tests.tools.engine_net import Net
from tests.tools.engine_outages import newest
from tests.tools.engine_programs import (
    Broken,
    CallStep,
    HookStep,
    ProgramStep,
    RaiseStep,
    Run,
    Step,
    draw,
)
from tests.tools.engine_values import Fuse

STEPS_MAX = 600  # Beyond most runs: some faults come too late to be noticed.

FAULTS = (
    "forward", "vjp", "hook", "program", "abandon", "expired", "crash", "two crashes",
    "restart", "two restarts", "partition",
)  # fmt: skip


_RESTARTS = ("restart", "two restarts")
_CALLS = ("forward", "vjp")  # Happen in functions that are called.


class Abandoned(Exception):
    """The top program stops here, whatever it waits for."""


def happen(fault: str, seed: int) -> str:
    """Run a program to which `fault` happens, and a good one after it.

    Returns: how it went. Raises: AssertionError: a worker that lives has something
    left, or the good program's gradients are not the oracle's.
    """
    rng = random.Random(f"{fault} {seed}")
    plan = with_hooks(draw(random.Random(seed)), random.Random(f"hooks {seed}"))
    if fault in ("forward", "vjp", "hook", "program"):
        plan = replace(plan, steps=_sabotaged(plan.steps, fault, rng))
    net = Net(plan.workers, rng)
    home = plan.workers[0]
    _arm(net, fault, rng)
    run: Run | None = None
    outcome = "untouched"
    try:
        run = Run(plan, net)
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
    """The next program, on who is left, is right."""
    apart = [max(pair) for pair in net.parted]
    alive = tuple(name for name in net.alive if name not in apart)
    run = Run(draw(random.Random(seed), alive), net)
    run.all()
    assert run.scope.leave() == ()


def _arm(net: Net, fault: str, rng: random.Random) -> None:
    """Have a fault happen before some step."""
    home = net.workers[0]
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
        """Crash; some time later join again, and be used at once, whoever knows."""
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


def _sabotaged(
    steps: Sequence[Step], fault: str, rng: random.Random
) -> tuple[Step, ...]:
    """The same steps, some of whose functions or programs raise."""
    return tuple(_sabotage(step, fault, rng) for step in steps)


def _sabotage(step: Step, fault: str, rng: random.Random) -> Step:
    if isinstance(step, HookStep) and fault == "hook" and rng.random() < 0.3:
        return replace(step, fuse=Fuse(fault, rng.choice((1, 1_000_000))))
    if isinstance(step, CallStep) and fault in _CALLS and rng.random() < 0.15:
        fuse = Fuse(fault, rng.choice((1, 1_000_000)))
        return replace(step, function=replace(step.function, fuse=fuse))
    if isinstance(step, ProgramStep):
        inner = _sabotaged(step.body, fault, rng)
        if fault == "program" and rng.random() < 0.5:
            inner = (*inner[: rng.randint(0, len(inner))], RaiseStep())
        return replace(step, body=inner)
    return step
