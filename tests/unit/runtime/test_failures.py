"""What errors of backwards say: the function, the user's lines, and nothing else."""

import re

import jax
import jax.numpy as jnp
import pytest

import jdag
from jdag.errors import RemoteError


@jax.custom_vjp
def bad(x):
    return jnp.sum(x)


@jax.custom_vjp
def called_back(x):
    return jnp.sum(x)


def no_way_back(*_):
    raise ValueError("there is no way back")


def asks_python(x, g):
    return (jax.pure_callback(no_way_back, jax.ShapeDtypeStruct((3,), x.dtype), g),)


bad.defvjp(lambda x: (jnp.sum(x), x), no_way_back)
called_back.defvjp(lambda x: (jnp.sum(x), x), asks_python)


def loops(x):
    return jnp.sum(jax.lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: y + 1, x))


def not_a_number(x):
    return jnp.sum(jnp.sqrt(x) * 0.0)


@pytest.mark.parametrize(
    ("driver", "exact"),
    [
        pytest.param("simulate", None, id="simulate-eager"),
        pytest.param("simulate", True, id="simulate-exact"),
        pytest.param("simulate", False, id="simulate-plan"),
        pytest.param("launch", None, id="launch-eager", marks=pytest.mark.second),
        pytest.param("launch", True, id="launch-exact", marks=pytest.mark.second),
        pytest.param("launch", False, id="launch-plan"),
    ],
)
def test_an_error_in_a_backward_says_so_and_shows_no_frame_of_jdag(driver, exact):
    def program(ctx, w, fn):
        return ctx.call("b", fn, ctx.call("b", jnp.sin, w))

    with jax.debug_nans(True):
        if driver == "launch":
            made = jdag.launch(["a", "b"], allow=["tests"])
        else:
            made = jdag.simulate(["a", "b"], seed=0)
        with made as cluster:
            w = cluster.put("b", jnp.zeros(3))
            for fn, kind, line in (
                (bad, "ValueError: there is no way back", "no_way_back"),
                (called_back, "CpuCallback error", "no_way_back"),
                (loops, "ValueError: Reverse-mode differentiation does not w", ""),
                (not_a_number, "FloatingPointError: invalid value (nan)", ""),
            ):
                with pytest.raises(RemoteError) as caught:
                    if exact is None:
                        with cluster.context() as ctx:
                            ctx.backward(program(ctx, w, fn))
                    else:
                        plan = jdag.compile(program, cluster, exact=exact)
                        plan.value_and_grad(w, fn)
                said = str(caught.value)
                if exact is not False or fn is not called_back:  # At run time: of all.
                    assert said.startswith(f"the backward of {__name__}:{fn.__name__} ")
                assert fn.__name__ in said and kind in said
                assert "test_failures.py:" in said.partition(" in ")[0]
                frames = re.findall(r'File "(.*)", line \d+, in (.*)', said)
                assert {name for _, name in frames} <= {line}, said
                assert bool(frames) == bool(line)
