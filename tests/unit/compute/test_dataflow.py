"""The graph of a plan: what differentiation adds, and in which order."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.drivers import simulate
from jdag.compute.dataflow import DataflowNode
from jdag.engine.segments import NodeKind
from tests.tools.compute_cases import array
from tests.tools.cutting_cases import Recorded, Var, bits


def scaled(w: Any, x: Any) -> Any:
    return jnp.sin(w * x)


def total(*arrays: Any) -> Any:
    return sum([jnp.sum(one * (0.7 + i)) for i, one in enumerate(arrays)])


def nodes_of(made: Recorded, kind: NodeKind) -> list[DataflowNode]:
    return [node for node in made.graph.nodes if node.kind is kind]


def makers(made: Recorded, addends: Sequence[int]) -> list[str]:
    nodes = {slot: node for node in made.graph.nodes for slot in node.outputs}
    return [nodes[one].site or nodes[one].kind.value for one in addends]


def test_cotangents_are_summed_where_a_value_was_used_in_the_order_of_calls() -> None:
    made = Recorded("a")
    w, x = made.leaf("a", array(3)), made.leaf("b", array(3, seed=1))
    y = made.call("a", scaled, w, w)  # Line 1.
    there = [made.call("b", scaled, y, x)]
    here = [made.call("a", scaled, y, y)]
    there += [made.call("b", scaled, y, x), made.call("b", scaled, y, y)]
    made.differentiate(made.call("a", total, *here, *there))
    of_y, *_ = nodes_of(made, NodeKind.SUM)
    assert of_y.worker == "b"
    lines = ["line 2", "line 4", "line 5", "line 5"]
    assert makers(made, of_y.inputs[0]) == lines
    last = nodes_of(made, NodeKind.VJP)[-1]
    # The transfer counts as its first call, before line 3.
    assert makers(made, last.inputs[1]) == ["sum", "line 3", "line 3"]


def test_a_transfer_without_gradient_does_not_count_as_the_first() -> None:
    made = Recorded("a")
    y = made.call("a", scaled, made.leaf("a", array(3)), 2.0)  # Line 1.
    made.call("b", scaled, Var(y.number, False), 3.0)
    here, there = made.call("a", scaled, y, 4.0), made.call("b", scaled, y, 5.0)
    made.differentiate(made.call("a", total, here, there))
    last = nodes_of(made, NodeKind.VJP)[-1]
    assert makers(made, last.inputs[1]) == ["line 3", "line 4"]


def test_a_transfer_sorts_by_its_slot_among_those_of_its_call() -> None:
    made = Recorded("a")
    leaves = [made.leaf("a", array(3, seed=seed)) for seed in range(3)]
    made.differentiate(made.call("b", total, *leaves, *reversed(leaves)))
    transfers = made.graph._transfers
    found = [transfers[leaf.number, "b", True] for leaf in leaves]
    assert found == [(0, 0), (0, 1), (0, 2)]


def test_seeds_come_last_in_order_of_the_roots() -> None:
    made = Recorded("a")
    w = made.leaf("a", array(3))
    y = made.call("a", total, w)
    z = made.call("b", jnp.sin, y)
    made.differentiate(y, z, y)
    (vjp, last) = nodes_of(made, NodeKind.VJP)
    assert makers(made, last.inputs[1]) == ["line 2", "fill", "fill"]
    assert vjp.worker == "b"
    assert list(last.inputs[1]) == [vjp.outputs[0], y.number + 2, y.number + 4]
    value = made.one_by_one()[made.gradients[made.leaves[0]]]
    expected = jax.grad(lambda w: 2 * total(w) + jnp.sin(total(w)))(array(3))
    np.testing.assert_allclose(value, expected, rtol=1e-12)


def first_and_second(a: Any, b: Any) -> tuple[Any, Any]:
    return jnp.sin(a), jnp.cos(b)


def test_a_leaf_that_gets_zeros_alone_has_zeros_and_one_not_needed_has_none() -> None:
    made = Recorded("a")
    w, v, u = [made.leaf("b", array(3, seed=seed)) for seed in range(3)]
    kept = made.leaf("b", array(3, seed=4), tracked=False)
    y, unused = made.call("a", first_and_second, w, made.call("c", scaled, v, kept))
    made.call("a", scaled, unused, u)
    stopped = Var(u.number, False)
    made.differentiate(made.call("a", total, y, stopped))
    assert list(made.gradients) == made.leaves[:2]
    values = made.one_by_one()
    gradients = [values[made.gradients[leaf]] for leaf in made.leaves[:2]]
    np.testing.assert_allclose(gradients[0], 0.7 * jnp.cos(array(3)), rtol=1e-12)
    np.testing.assert_array_equal(gradients[1], jnp.zeros(3))
    fills = [node for node in nodes_of(made, NodeKind.FILL) if not node.keeps]
    assert [(node.worker, node.inputs) for node in fills] == [("b", ((v.number,),))]
    # The call on c has no vjp: nothing but a symbolic zero comes to it.
    assert [node.worker for node in nodes_of(made, NodeKind.VJP)] == ["a", "a"]


@pytest.mark.parametrize("listed", [False, True])
def test_many_uses_of_a_leaf_with_zeros_among_them_have_the_bits_of_a_pass(
    listed: bool,
) -> None:
    """Every third use gives it a symbolic zero, on its worker and on another one."""
    parts = [array(3, seed=seed) * 10.0 ** (seed % 5) for seed in range(60)]
    with simulate(["a", "b"], seed=0) as cluster:
        leaves = [cluster.put("b", array(3, seed=seed)) for seed in (60, 61)]
        with cluster.context() as ctx:
            ctx.backward(_uses(ctx.call, leaves[0], leaves[1], parts))
            wanted = [ctx.gradient(leaf).fetch() for leaf in leaves]
    made = Recorded("a")
    made.graph._listed = listed
    w, v = [made.leaf("b", array(3, seed=seed)) for seed in (60, 61)]
    made.differentiate(_uses(made.call, w, v, parts))
    values = made.one_by_one()
    assert bits([values[n] for n in made.gradients.values()]) == bits(wanted)
    sums = [len(node.inputs[0]) for node in nodes_of(made, NodeKind.SUM)]
    assert max(sums) <= 8  # Since places are empty, also where no schedule lists.


def _uses(call: Any, w: Any, v: Any, parts: Sequence[Any]) -> Any:
    made: list[Any] = []
    for number, part in enumerate(parts):
        both = (v, w) if number % 3 == 0 else (w, v)
        made.append(call("ab"[number % 2], products, *both, part)[0])
    return call("a", total, *made)


def products(a: Any, b: Any, part: Any) -> tuple[Any, Any]:
    return a * part, b * part


def test_calls_after_differentiation_follow_it() -> None:
    made = Recorded("a")
    w = made.leaf("b", array(3))
    made.differentiate(made.call("a", total, w))
    (gradient,) = made.gradients.values()
    norm = made.call("b", jnp.vdot, *[Var(gradient, False)] * 2)
    assert (made.graph.worker(norm.number), norm.tracked) == ("b", False)
    values = made.one_by_one()
    np.testing.assert_allclose(values[norm.number], 3 * 0.7**2, rtol=1e-12)
