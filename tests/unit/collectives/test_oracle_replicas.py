"""What the oracle has in place of routes is plain JAX, and refuses the same."""

import jax
import jax.numpy as jnp
import pytest

import jdag
from jdag.collectives import oracle_replicas as plain
from jdag.collectives.routes import HOW
from jdag.errors import JdagError
from tests.tools.replica_cases import REPLICAS, total, weighed


def test_a_sum_is_that_of_python():
    ones = [jnp.full(3, 10.0**number) for number in range(4)]
    assert plain.left_sum(*ones).tolist() == [1111.0] * 3
    assert plain.left_sum(*ones[:1]).tolist() == [1.0] * 3


@pytest.mark.parametrize("how", HOW)
def test_nothing_but_moves_and_sums_is_in_what_the_oracle_differentiates(how):
    def program(ctx, w):
        replicas = ctx.replicate(REPLICAS, {"w": w}, how)
        sums = ctx.all_reduce(dict(zip(REPLICAS, replicas, strict=True)), how)
        losses = [ctx.call(one, weighed, sums[one], {"w": 2.0}) for one in REPLICAS]
        return ctx.call("m", total, *losses)

    def differentiated(w):
        return jdag.oracle(program)(w)

    text = str(jax.make_jaxpr(differentiated)(jnp.ones(3)))
    assert "custom_vjp" not in text
    assert "concatenate" not in text
    value, gradient = differentiated(jnp.ones(3))
    assert value == 4 * 2 * 4 * 3
    assert gradient.tolist() == [4 * 2 * 4] * 3


def test_what_a_context_refuses_the_oracle_refuses():
    def asked(ask):
        with pytest.raises(JdagError) as told:
            jdag.oracle(ask)({"w": jnp.ones(3), "b": jnp.ones(2)})
        return str(told.value)

    assert "takes each worker once" in asked(lambda c, p: c.replicate(["a", "a"], p))
    assert "how='star'" in asked(lambda c, p: c.replicate(["a"], p, "star"))
    unequal = asked(lambda c, p: c.all_reduce({"a": p["w"], "b": p["b"]}))
    assert "of 'a' is float64[3], but of 'b' it is float64[2]" in unequal
    assert "names of workers" in asked(lambda c, p: c.all_reduce([p["w"]]))
    assert "() has no refs" in asked(lambda c, p: c.all_gather({"a": ()}))
    few = asked(lambda c, p: c.all_to_all({"a": [p["w"]], "b": [p["w"]] * 2}))
    assert "a list of 2 pytrees, one for each worker in order; 'a' has 1" in few
    whole = asked(lambda c, p: c.reduce_scatter({"a": p, "b": p}))
    assert "'a' has " in whole and "dict" in whole
    shares = {"a": lambda p: [p["w"], p["w"]], "b": lambda p: [p["w"], p["b"]]}
    unequal = asked(
        lambda c, p: c.reduce_scatter({name: make(p) for name, make in shares.items()})
    )
    assert "of 'a' is float64[3], but of 'b' it is float64[2]" in unequal
