"""What programs share: workers by name, values as they are held, one nesting of JAX."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.avals import Aval
from jdag.context.cluster_state import ClusterState
from jdag.engine.protocol import LeafId
from jdag.errors import ContextError, JdagError
from jdag.settings.session_settings import RunSettings
from tests.tools.error_texts import fails_with


def test_values_are_held_as_they_are_or_as_their_shapes_alone():
    value = np.ones(3)
    assert ClusterState(RunSettings(["a"]), abstract=False).value(value) is value
    abstract = ClusterState(RunSettings(["a"]), abstract=True)
    assert isinstance(abstract.value(value), Aval)
    assert isinstance(abstract.value(2.0), Aval) and abstract.value(2.0).weak


def test_shapes_stand_for_arrays_in_abstract_mode_alone():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert ClusterState(RunSettings(["a"]), abstract=True).is_named(shape)
    assert not ClusterState(RunSettings(["a"]), abstract=False).is_named(shape)


def test_a_home_made_under_jit_is_refused_outside_of_it_and_the_other_way_round():
    homes = []

    @jax.jit
    def traced(x):
        homes.append(ClusterState(RunSettings(["a"]), abstract=False))
        homes[0].check_open("a call")
        return x

    traced(1.0)
    with fails_with(ContextError, "context.a_call_inside_of"):
        homes[0].check_open("a call")


@pytest.mark.parametrize(
    ("worker", "text"),
    [
        ("ps10", "no worker 'ps10' (did you mean ps1?); the workers"),
        ("nothing like it", "no worker 'nothing like it'; the workers are 'tr', 'ps1'"),
        (1, "takes the name of a worker first, not 1; the workers are 'tr', 'ps1'"),
        (np.zeros(2), "takes the name of a worker first, not array([0., 0.]); the wo"),
    ],
)
def test_an_unknown_worker_is_named_with_those_that_there_are(worker, text):
    home = ClusterState(RunSettings(["tr", "ps1"]), abstract=False)
    home.driver = SimpleNamespace(incarnations={"tr": 2})
    assert home.place("ps1", "ctx.call") == ("ps1", None)
    assert home.place("tr", "ctx.call") == ("tr#2", None)
    with pytest.raises(JdagError) as caught:
        home.place(worker, "ctx.call")
    assert text in str(caught.value) and str(caught.value).startswith("ctx.call")


def test_records_of_untracked_leaves_of_other_processes_go_with_their_refs():
    state, aval = (
        ClusterState(RunSettings(["a"]), abstract=False),
        Aval((3,), np.dtype("f4")),
    )
    for counter in range(3):
        tracked = LeafId.made_by(1, 0, counter, "b")
        untracked = LeafId.made_by(1, 0, 1 << 31 | counter, "b")
        record = state.record(untracked, aval)
        assert state.record(untracked, aval) is record and not record.tracked
        assert state.record(tracked, aval).tracked
    assert len(state.leaves) == 3 and len(state._far) == 1
