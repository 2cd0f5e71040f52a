"""A ref says what it names, and refuses to be an array, saying what to do instead."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag.compute.avals import aval_of
from jdag.compute.refs import is_ref
from jdag.context.refs import Leaf, Ref, fetch, stop_gradient
from jdag.engine.protocol import (
    ContextId,
    Failure,
    GradientKey,
    LeafId,
    LeafKey,
    NewestKey,
    OutputKey,
)
from jdag.errors import ContextError, JdagError, RemoteError
from jdag.runtime.failures import exception_of
from tests.tools.error_texts import fails_with

AVAL = aval_of(jnp.ones((2, 3)))


class Held:
    def __init__(self, values=None):
        self.values = values or {}
        self.state = self
        self.requests = []

    def read(self, refs):
        self.requests.append(len(refs))
        return [self.values[ref.key] for ref in refs]

    def seen(self, failure):
        return exception_of(failure)


def output(held, number=1, index=0):
    key = OutputKey(ContextId(0, 7, 0), (2, number), index)
    return Ref(held, key, "ps0", AVAL, tracked=True)


def leaf_of(held, leaf):
    return Ref(held, leaf.key, leaf.id.worker, leaf.aval, True, leaf=leaf)


def test_metadata_are_those_of_the_array():
    ref = output(Held())
    assert (ref.shape, ref.dtype, ref.size, ref.ndim) == ((2, 3), np.float64, 6, 2)
    assert (ref.worker, ref.tracked) == ("ps0", True)
    assert repr(ref) == (
        "Ref(float64[2,3], output 0 of call 2.1 on ps0 in context 0.7, tracked)"
    )


def test_refs_of_a_leaf_name_whichever_version_is_the_newest_and_are_equal():
    held, leaf = Held(), Leaf(LeafId("ps0", 4), AVAL)
    ref = leaf_of(held, leaf)
    assert ref.key == NewestKey(None, LeafId("ps0", 4), 0)
    assert leaf.first == LeafKey(None, LeafId("ps0", 4), 0)
    assert ref == leaf_of(held, leaf) and hash(ref) == hash(leaf_of(held, leaf))
    assert ref == stop_gradient(ref) and not stop_gradient(ref).tracked
    assert repr(ref) == "Ref(float64[2,3], leaf 4 on ps0, tracked)"
    other = leaf_of(held, Leaf(LeafId("ps1", 4), AVAL))
    assert ref != other and {ref: 1, other: 2}[leaf_of(held, leaf)] == 1


def test_a_leaf_says_which_worker_made_it_unless_that_is_the_first():
    assert str(LeafId("ps0", 2 << 48 | 4)) == "leaf 2.4 on ps0"
    assert str(LeafId("ps0", 4)) == "leaf 4 on ps0"


def test_refs_are_equal_when_they_name_the_same_value_of_one_cluster():
    held = Held()
    assert output(held) == output(held) and hash(output(held)) == hash(output(held))
    assert output(held) != output(held, index=1)
    assert output(held) != output(Held())
    assert output(held) != "output"


def test_a_ref_is_a_leaf_of_pytrees():
    ref = output(Held())
    assert jax.tree.leaves({"a": [ref, None]}) == [ref]


def test_fetch_reads_all_refs_of_a_program_at_once_and_keeps_the_rest():
    held, other = Held(), Held()
    refs = [output(held, 1), output(held, 2), output(other, 3)]
    held.values = {refs[0].key: 10, refs[1].key: 20}
    other.values = {refs[2].key: 30}
    got = fetch({"a": refs, "b": 5, "c": None})
    assert got == {"a": [10, 20, 30], "b": 5, "c": None}
    assert (held.requests, other.requests) == ([2], [1])
    assert refs[1].fetch() == 20


def test_fetch_raises_the_first_failure():
    held = Held()
    refs = [output(held, number) for number in (1, 2, 3)]
    failures = [
        Failure("RemoteError", f"says {n}", "ps0", (n,), "m:f", "a.py:1 in g")
        for n in (2, 3)
    ]
    held.values = dict(zip([ref.key for ref in refs], [1, *failures], strict=True))
    with fails_with(RemoteError, "context.m_f_failed_on_ps0"):
        fetch(refs)


OPERATIONS: dict[str, Any] = {
    "jnp": jnp.sin,
    "jnp.asarray": jnp.asarray,
    "jnp.stack": lambda ref: jnp.stack([ref, ref]),
    "jnp left": lambda ref: jnp.ones(3) + ref,
    "jnp matmul": lambda ref: jnp.ones(3) @ ref,
    "jit": jax.jit(lambda x: x),
    "grad": jax.grad(lambda x: x),
    "vmap": jax.vmap(lambda x: x),
    "numpy": np.sin,
    "numpy left": lambda ref: np.ones(3) * ref,
    "np.asarray": np.asarray,
    "float": float,
    "int": int,
    "complex": complex,
    "bool": bool,
    "not": lambda ref: not ref,
    "len": len,
    "iter": list,
    "in": lambda ref: 1 in ref,
    "range": range,
    "index": lambda ref: ref[0],
    "set": lambda ref: ref.__setitem__(0, 1),
    "+": lambda ref: ref + 1,
    "1 +": lambda ref: 1 + ref,
    "-": lambda ref: ref - ref,
    "@": lambda ref: ref @ ref,
    "**": lambda ref: ref**2,
    "neg": lambda ref: -ref,
    "abs": abs,
    "<": lambda ref: ref < 1,
    ">=": lambda ref: ref >= 1,
    "==": lambda ref: ref == 1.0,
    "== array": lambda ref: ref == np.ones(2),
    "round": round,
    "format": lambda ref: f"{ref:.3f}",
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_takes_an_array_says_what_to_do_with_a_ref(name):
    with pytest.raises(ContextError) as caught:
        OPERATIONS[name](output(Held()))
    said = str(caught.value)
    assert "output 0 of call 2.1 on ps0" in said, said
    assert "ctx.call(worker, fn, ref)" in said and "ref.fetch()" in said, said


def test_a_method_of_arrays_is_no_attribute_and_says_what_to_do():
    ref = output(Held())
    assert not hasattr(ref, "sum")
    with fails_with(AttributeError, "context.no_attribute_sum_ctx_call"):
        ref.sum()


def test_a_plain_format_is_the_repr():
    ref = output(Held())
    assert f"{ref}" == repr(ref)


def test_stop_gradient_keeps_all_but_the_tracking():
    held = Held()
    key = GradientKey(ContextId(0, 1, 0), LeafId("ps0", 0), 1)
    gradient = Ref(held, key, "ps0", AVAL, False, descends=LeafId("ps0", 0))
    (stopped,) = stop_gradient([gradient])
    assert stopped.descends is None and stopped == gradient
    tracked = stop_gradient({"a": output(held)})["a"]
    assert not tracked.tracked and tracked.aval == AVAL and is_ref(tracked)


def test_stop_gradient_takes_refs_alone():
    with fails_with(JdagError, "context.takes_a_ref"):
        stop_gradient(1.0)


def test_an_exception_is_of_the_class_that_its_failure_names():
    original = ValueError("x")
    failure = Failure(
        "RemoteError",
        "ValueError: x",
        "c",
        (1,),
        "m:f",
        "a.py:3 in g",
        traceback="Traceback: user's",
        route=("a", "b", "c"),
        exception=original,
    )
    error = exception_of(failure)
    assert type(error) is RemoteError and error.__cause__ is original
    assert str(error) == (
        "m:f failed on 'c', called at a.py:3 in g: ValueError: x\n"
        "route of workers: a <- b <- c\n\nTraceback: user's"
    )
    assert type(exception_of(Failure("GraphError", "spent", "a"))).__name__ == (
        "GraphError"
    )


# A thread keeps two modules; as Python ends, the globals of the later one go first.
LATE = """
import sys, threading, types
early = sys.modules["early"] = types.ModuleType("early")
from jdag.context import refs
early.hold = refs.Hold([], None, None)
kept = early, refs, threading.Event()
threading.Thread(target=lambda kept: kept[2].wait(), args=(kept,), daemon=True).start()
"""


@pytest.mark.second
def test_a_ref_that_outlives_its_module_as_python_ends_says_nothing():
    command = [sys.executable, "-c", LATE]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_of_refs_and_handles_are_refused_with_the_remedy(cluster, copied):
    w, ref = cluster.put("b", jnp.ones(3)), output(Held())
    for tree in (w, ref) if copied is copy.copy else (w, ref, {"w": [w, 1.0]}):
        with fails_with(ContextError, "context.a_copy_of_ref_cluster"):
            copied(tree)
    with fails_with(JdagError, "context.a_copy_of_hosted_list"):
        copied(cluster.host("b", list))
    with fails_with(JdagError, "context.would_step_the_same_of"):
        copied(jdag.Optimizer(optax.sgd(0.1), w))
    with fails_with(JdagError, "context.cluster_cannot_be_copied"):
        copied(cluster)
