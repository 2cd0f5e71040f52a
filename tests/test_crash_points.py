"""Recovery wherever workers crash: points, victims, orders and programs are drawn."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import jdag
from jdag import testing
from jdag.sim import Crash, LinkModel
from jdag.testing.drawn import Program
from tests.recovery_cases import WORKERS, Patient, bits, live
from tests.tiers import sized

Play = Callable[[Any, Patient, str | None], Any]
PLACES = st.floats(0, 1, exclude_max=True)  # Parts of a quiet run.
TIMES = st.integers(0, 2_000)
# A failure is small as it is, and to shrink it takes minutes.
drawn_from = partial(settings, phases=[Phase.explicit, Phase.generate])
LINK = LinkModel(latency_ns=100, jitter_ns=1_000)


def crashes(workers: Sequence[str]) -> Any:
    """Lists of crashes: where, the victim, when others notice it, when it is back."""
    one = st.tuples(PLACES, st.sampled_from(workers[1:]), TIMES, TIMES)
    return st.lists(one, min_size=1, max_size=3)


def played(
    play: Play, workers: Sequence[str], seed: int = 0, crashed: Any = (), records=0
) -> tuple[Any, int]:
    """The bits that a program ends with, and the number of records of its trace."""
    faults = [
        Crash(victim, detect_ns, at_index=int(place * records), restart_ns=restart_ns)
        for place, victim, detect_ns, restart_ns in crashed
    ]
    # Two neighbours that are lost at once lose leaves, unless the caller has copies.
    to = workers[0] if len(faults) > 1 else None
    made: dict[str, Any]
    made = {"seed": seed, "recover": True, "network": LINK, "faults": faults}
    with jdag.simulate(workers, **made) as cluster:
        found = play(cluster, Patient(cluster, cluster.recover), to)
        return found, len(cluster.trace)


def lived(every: int, cluster: Any, patient: Patient, to: str | None) -> Any:
    return live(cluster, patient, every, to)


quiet_life = cache(lambda every: played(partial(lived, every), WORKERS))


@drawn_from(max_examples=sized(12, 400))
@given(st.integers(0, 99), st.integers(1, 3), crashes(WORKERS))
@example(42, 3, [(0.838, "c", 165, 0), (0.838, "c", 0, 549)])  # Amid two contexts.
@example(38, 2, [(0.0026, "b", 0, 731), (0.11, "b", 997, 884)])  # Before any copies.
def test_open_contexts_go_on_with_the_same_bits_wherever_workers_crash(
    seed: int, every: int, crashed: Any
):
    quiet, records = quiet_life(every)
    found, _ = played(partial(lived, every), WORKERS, seed, crashed, records)
    assert found == quiet


class PatientContext:
    """A context whose requests are repeated after each loss."""

    def __init__(self, ctx: Any, patient: Patient) -> None:
        self._ctx, self._patient = ctx, patient

    def __getattr__(self, name: str) -> Any:
        return partial(self._patient, getattr(self._ctx, name))


def differentiated(
    program: Program, cluster: Any, patient: Patient, to: str | None
) -> Any:
    """The bits of the gradients of a drawn program, in a context that stays open."""
    case = program.case()
    refs = {
        name: patient(cluster.put, case.placement[name], value)
        for name, value in case.params.items()
    }
    patient(cluster.replicate_leaves, to=to)
    opened = cluster.context().__enter__()
    ctx = PatientContext(opened, patient)
    root = case.program(ctx, refs)
    for number in range(case.passes):
        ctx.backward(root, retain_graph=number + 1 < case.passes, mode=case.mode)
    found = [patient(one.fetch) for one in ctx.gradients().values()]
    patient.left(opened)
    return bits(found)


@drawn_from(max_examples=sized(12, 200))
@given(st.data())
def test_drawn_programs_have_the_same_gradients_wherever_workers_crash(data: Any):
    program = data.draw(testing.programs(testing.clusters(2)))
    play = partial(differentiated, program)
    quiet, records = played(play, program.workers)
    seed, crashed = data.draw(st.integers(0, 99)), data.draw(crashes(program.workers))
    found, _ = played(play, program.workers, seed, crashed, records)
    assert found == quiet
