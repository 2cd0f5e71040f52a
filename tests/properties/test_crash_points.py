"""Recovery wherever workers crash: points, victims, orders and programs are drawn."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import jdag
from jdag import testing
from jdag.sim import Crash, LinkModel
from jdag.testing.drawn import Program
from tests.tools.recovery_cases import Patient, bits
from tests.tools.tiers import sized

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
    faults = [
        Crash(victim, detect_ns, at_index=int(place * records), restart_ns=restart_ns)
        for place, victim, detect_ns, restart_ns in crashed
    ]
    # Two neighbours that are lost at once lose leaves, unless the caller has copies.
    to = workers[0] if len(faults) > 1 else None
    made: dict[str, Any]
    made = {"seed": seed, "recover": True, "network": LINK, "faults": faults}
    with jdag.simulate(workers, **made) as cluster:
        found = play(cluster, Patient(cluster.recover), to)
        return found, len(cluster.trace)


def differentiated(
    program: Program, cluster: Any, patient: Patient, to: str | None
) -> Any:
    case = program.case()
    patient(cluster.replicate_leaves, to=to)
    refs = {
        name: patient(cluster.put, case.placement[name], value)
        for name, value in case.params.items()
    }

    def run() -> Any:
        with cluster.context() as ctx:
            root = case.program(ctx, refs)
            for number in range(case.passes):
                ctx.backward(
                    root, retain_graph=number + 1 < case.passes, mode=case.mode
                )
            return bits(jdag.fetch(list(ctx.gradients().values())))

    return patient(run)


@drawn_from(max_examples=sized(12, 200))
@given(st.data())
def test_drawn_programs_have_the_same_gradients_wherever_workers_crash(data: Any):
    program = data.draw(testing.programs(testing.clusters(2)))
    play = partial(differentiated, program)
    quiet, records = played(play, program.workers)
    seed, crashed = data.draw(st.integers(0, 99)), data.draw(crashes(program.workers))
    found, _ = played(play, program.workers, seed, crashed, records)
    assert found == quiet
