"""The table of phases: whole, and the error messages read it."""

from typing import Any
from unittest import mock

import pytest

from jdag.engine.engine import Engine
from jdag.engine.phases import (
    NEXT,
    TAKES,
    TRIPLES,
    OwnedFragment,
    PartPhase,
    Phase,
    Situation,
    triple,
)
from jdag.engine.protocol import (
    Attached,
    ContextId,
    Differentiated,
    End,
    Ended,
    Event,
    Failure,
    Go,
    Issued,
    Launched,
    Left,
    Lost,
    Mark,
    Mode,
    Outcome,
    Released,
    Start,
)
from jdag.errors import ContextError, WorkerLost
from tests.properties.test_engine_random import run_program
from tests.tools.engine_cases import begun, holding, nothing_left, pausing
from tests.tools.engine_faults import FAULTS, happen
from tests.tools.engine_net import Net, Scope
from tests.tools.engine_values import DOUBLE, SAME, Linear
from tests.tools.error_texts import fails_with

CONTEXT = ContextId(0, 7, 0)
CAUSES = (
    Issued, Launched, Attached, Differentiated, Left, Lost, Start, Mark, Go, End, Ended,
    Released,
)  # fmt: skip


def test_every_phase_has_a_row_and_every_row_names_causes_that_are_known():
    assert list(NEXT) == list(Phase)
    for row in NEXT.values():
        for cause, following in row.items():
            assert cause in CAUSES and isinstance(following, Phase)


def test_every_phase_can_be_reached_and_every_one_leads_to_released():
    def reached(start: Phase) -> list[Phase]:
        actual = [start]
        for phase in actual:
            actual.extend(p for p in NEXT[phase].values() if p not in actual)
        return actual

    assert sorted(p.name for p in reached(Phase.OPEN)) == sorted(p.name for p in Phase)
    for phase in Phase:
        assert Phase.RELEASED in reached(phase)


def test_nothing_comes_in_a_phase_that_does_not_take_it():
    """Held against random programs, undisturbed and with each kind of fault."""
    assert list(TAKES) == [*Phase, *PartPhase]
    assert len(dict.fromkeys(TRIPLES)) == len(TRIPLES)
    reached: dict[Situation, None] = {}
    handle = Engine.handle

    def watched(engine: Engine, event: Event) -> Any:
        reached.update(dict.fromkeys(engine.situations(event)))
        return handle(engine, event)

    with mock.patch.object(Engine, "handle", watched):
        for seed in range(3):
            run_program(seed)
            for fault in FAULTS:
                happen(fault, seed)
    assert [one for one in reached if triple(*one) not in TRIPLES] == []
    assert len(reached) > 70


@pytest.mark.parametrize(
    ("phase", "cause"),
    [(phase, cause) for phase in Phase for cause in NEXT[phase]],
)
def test_what_the_table_allows_leads_to_the_phase_that_it_names(
    phase: Phase, cause: type
):
    fragment = OwnedFragment(CONTEXT, "a", phase=phase)
    fragment.advance(cause)
    assert fragment.phase is NEXT[phase][cause]


@pytest.mark.parametrize(
    ("phase", "cause"),
    [(phase, cause) for phase in Phase for cause in CAUSES if cause not in NEXT[phase]],
)
def test_what_the_table_does_not_allow_names_phase_event_and_what_is_allowed(
    phase: Phase, cause: type
):
    fragment = OwnedFragment(CONTEXT, "a", phase=phase)
    with pytest.raises(ContextError) as caught:
        fragment.advance(cause)
    allowed = ", ".join(kind.__name__ for kind in NEXT[phase]) or "nothing"
    assert str(caught.value) == (
        f"context 0.7 is {phase.value} and cannot handle {cause.__name__}; "
        f"in this phase it handles {allowed}"
    )
    assert fragment.phase is phase


def test_a_context_that_lost_a_worker_says_so_in_place_of_its_phase():
    lost = Failure("WorkerLost", "worker 'b' is lost", "b")
    fragment = OwnedFragment(CONTEXT, "a", phase=Phase.FAILED, lost=lost)
    with fails_with(WorkerLost, "engine.later_context_has_failed"):
        fragment.advance(Issued)


PASSES = (
    Phase.GATHERING, Phase.ANNOUNCING, Phase.MARKING, Phase.RUNNING, Phase.ENDING,
)  # fmt: skip


def in_phase(phase: Phase) -> tuple[Net, Scope]:
    net, scope, x, y = begun(3, "bc")
    (one,) = scope.call("b", DOUBLE, x)
    (two,) = scope.call("c", SAME, y)
    if phase is not Phase.GATHERING:
        net.drain()
    roots = (one,) if phase in (Phase.RUNNING, Phase.ENDING) else (one, two)
    if phase is Phase.FAILED:
        net.crash("c")
    if phase in PASSES:
        net.pauses = pausing("double")
        mode = Mode.SMART if phase is Phase.MARKING else Mode.FAST
        scope.start_backward(*roots, mode=mode)
        if phase in (Phase.ANNOUNCING, Phase.MARKING):
            net.holds = holding(Start)
    if phase is Phase.ENDING:
        net.let_go()
        net.holds = holding(End)
    if phase is Phase.LEAVING:
        net.pauses = pausing("late")
        scope.call("b", Linear("late", ((1,),)), x)
        scope.start_leaving()
    if phase is not Phase.GATHERING:
        net.drain()
    engine: Any = net.places["a"].engine
    assert engine._state.contexts[scope.context].phase is phase
    return net, scope


@pytest.mark.parametrize(
    ("phase", "told"),
    [
        (phase, told)
        for phase in Phase
        if phase not in (Phase.OPEN, Phase.FAILED, Phase.RELEASED)
        for told in (Issued, Launched, Differentiated, Left)
        if told not in NEXT[phase]
    ],
)
def test_an_engine_refuses_what_the_phase_does_not_take_and_is_none_the_worse(
    phase: Phase, told: type
):
    net, scope = in_phase(phase)
    engine = net.places["a"].engine
    x = net.put("b", 1, "a")
    passes = scope.passes
    refused = rf"context 0\.1 is {phase.value} and cannot handle {told.__name__}; in"
    with pytest.raises(ContextError, match=refused):
        if told is Issued:
            scope.call("b", DOUBLE, x, 1)
        elif told is Launched:
            scope.launch("b", iter, x)
        elif told is Differentiated:
            scope.start_backward(x, seeds=(1,))
        else:
            scope.start_leaving()
    scope.passes = passes
    net.let_go()
    net.drain()
    if phase is not Phase.LEAVING:
        assert engine.live_passes == 0
        scope.leave()
    nothing_left(net)


@pytest.mark.parametrize("phase", [p for p in Phase if p is not Phase.RELEASED])
@pytest.mark.parametrize("victim", ["b", "c"])
def test_a_worker_can_be_lost_in_every_phase_and_nothing_is_left(
    phase: Phase, victim: str
):
    net, scope = in_phase(phase)
    if victim not in net.dead:
        net.crash(victim)
    net.let_go()
    net.drain()
    results = [r for r in net.places["a"].resumed.values() if hasattr(r, "outcome")]
    for result in results:
        took_part = result.outcome is Outcome.FAILED
        assert took_part or phase is Phase.ENDING, result
    if phase is not Phase.LEAVING:
        scope.leave()
    nothing_left(net)
