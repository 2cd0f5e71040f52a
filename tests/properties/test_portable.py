"""Functions that cannot go as StableHLO: warned of in simulation, refused in launch."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.errors import JdagError, PortabilityWarning
from jdag.processes.functions import encoder as function_encoder

KINDS = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec as P

WHERE = __name__  # Equal functions of two modules would be one.
MESH = Mesh(np.array(jax.devices()[:2]), ("rows",))

def lay(w, x):
    return jnp.tanh(x @ w) if WHERE else x

def mse(y, x):
    return jnp.mean((y - x) ** 2) if WHERE else x

def printed(w, x):
    jax.debug.print("the first is {}", x[0, 0])
    return lay(w, x)

def checked(w, x):
    return eqx.error_if(lay(w, x), jnp.any(jnp.isnan(x)), "not a number")

def read_back(w, x):
    of = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return lay(w, x) + jax.lax.stop_gradient(jax.pure_callback(np.sin, of, 2 * x))

def told(w, x):
    io_callback(lambda *_: None, None, 1.0)
    return lay(w, x)

def sharded(w, x):
    specs = {"in_specs": (P(), P("rows")), "out_specs": P("rows")}
    return jax.shard_map(lay, mesh=MESH, **specs)(w, x)

def mapped(w, x):
    return jax.pmap(lay, in_axes=(None, 0))(w, x[:, None])[:, 0]
"""
NAMES = ("printed", "checked", "read_back", "told", "sharded", "mapped")
SCRIPT = """
import sys, jdag

def direct(w, x, fn):
    return mse(fn(w, x), x)

if __name__ == "__main__":
    w, x = jnp.arange(9.0).reshape(3, 3) / 9, jnp.arange(6.0).reshape(2, 3) / 6
    with jdag.launch(["a", "b"]) as cluster:
        leaf = cluster.put("b", w)
        if sys.argv[1] == "hvp":
            program = lambda ctx, w: ctx.call("b", mse, ctx.call("b", lay, w, x), x)
            found = jdag.hvp(program, cluster)(leaf, w)
            wanted = jax.jvp(lambda w: jax.grad(direct)(w, x, lay), (w,), (w,))[1]
        else:
            fn = globals()[sys.argv[1]]
            with cluster.context() as ctx:
                ctx.backward(ctx.call("b", mse, ctx.call("b", fn, leaf, x), x))
                found = ctx.gradient(leaf).fetch()
            wanted = jax.grad(direct)(w, x, fn)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("script") / "train.py"
    file.write_text(KINDS + SCRIPT)
    return file


def ran(script: Path, kind: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script.name, kind],
        cwd=script.parent,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


SECOND = pytest.mark.second


def kinds(name: str) -> Any:
    space: dict[str, Any] = {"__name__": name}
    exec(KINDS, space)
    space["MESH"] = jax.sharding.AbstractMesh((2,), ("rows",))
    return space


def simulated(use: Any) -> None:
    made = jdag.simulate(["a", "b"], seed=0, values="abstract")
    with made as cluster, cluster.context() as ctx:
        use(cluster, ctx)


def piped(fn: Any, mse: Any) -> Any:
    def use(cluster: Any, ctx: Any) -> Any:
        return jdag.pipeline([fn], mse)(
            ctx, [cluster.put("b", jnp.eye(3))], *[[XS] * 3] * 2
        )

    return use


def called(fn: Any, mse: Any) -> Any:
    return lambda cluster, ctx: ctx.call("b", fn, cluster.put("b", jnp.eye(3)), XS)


def twice(fn: Any, mse: Any) -> Any:
    def program(ctx: Any, w: Any) -> Any:
        return ctx.call("b", mse, ctx.call("b", fn, w, XS), XS)

    return lambda cluster, _: jdag.hvp(program, cluster)(
        cluster.put("b", jnp.eye(3)), jnp.eye(3)
    )


XS = jnp.ones((2, 3))
WHY = dict.fromkeys(NAMES, "calls back into Python, as")
WHY["sharded"] = "is for 2 devices, as"
USES = [(use, kind) for use in (called, piped) for kind in NAMES[:-1]]


@pytest.mark.parametrize(("use", "kind"), USES)
def test_simulate_warns_of_what_launch_would_not_take(
    use: Any, kind: str, monkeypatch: pytest.MonkeyPatch
):
    space = kinds("nowhere")
    monkeypatch.setattr(function_encoder, "_warned", [])
    said = rf"it {WHY[kind]}.* by name: .*nowhere:{kind}"
    with pytest.warns(PortabilityWarning, match=said):
        simulated(use(space[kind], space["mse"]))


@pytest.mark.parametrize("kind", NAMES[:-1])
@pytest.mark.filterwarnings("error::jdag.errors.PortabilityWarning")
def test_simulate_does_not_warn_of_a_function_of_an_imported_module(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    module = ModuleType("somewhere")
    monkeypatch.setitem(sys.modules, "somewhere", module)
    vars(module).update(kinds("somewhere"))
    monkeypatch.setattr(function_encoder, "_warned", [])
    for use in (called, piped):
        simulated(use(getattr(module, kind), vars(module)["mse"]))


@pytest.mark.parametrize("name", ["nowhere", "somewhere"])
def test_simulate_warns_of_a_second_derivative_of_what_has_no_name(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    module = ModuleType("somewhere")
    monkeypatch.setitem(sys.modules, "somewhere", module)
    vars(module).update(space := kinds(name))
    monkeypatch.setattr(function_encoder, "_warned", [])
    use = twice(space["lay"], space["mse"])
    with jdag.simulate(["a", "b"], seed=0) as cluster:
        use(cluster, None)
    said = "it is differentiated twice by jdag.hvp"
    assert [said in one for one in function_encoder._warned] == [True] * (
        name == "nowhere"
    )


@pytest.mark.parametrize("kind", [pytest.param("printed", marks=SECOND), "read_back"])
def test_launch_refuses_it_by_the_users_name_and_a_true_remedy(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "kinds_of.py").write_text(KINDS)
    monkeypatch.syspath_prepend(tmp_path)
    module, space = importlib.import_module("kinds_of"), kinds("nowhere")
    with jdag.launch(["a", "b"], allow=["kinds_of"]) as cluster:
        for use in (called, piped):
            with cluster.context() as ctx:
                said = rf"by name: .*nowhere:{kind}.* as StableHLO: .* {WHY[kind]}"
                with pytest.raises(JdagError, match=said):
                    use(space[kind], space["mse"])(cluster, ctx)
                found = use(getattr(module, kind), module.mse)(cluster, ctx)
                jdag.fetch(found)
        w = cluster.put("b", jnp.eye(3))

        def program(ctx: Any, w: Any) -> Any:
            return jdag.pipeline([module.lay], module.mse)(ctx, [w], [XS], [XS])[0]

        def loss(w: Any) -> Any:
            return module.mse(module.lay(w, XS), XS)

        product = jdag.hvp(program, cluster)(w, jnp.eye(3))
        wanted = jax.jvp(jax.grad(loss), (jnp.eye(3),), (jnp.eye(3),))[1]
        np.testing.assert_allclose(product, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=SECOND) for k in (*NAMES, "hvp")]
)
def test_a_guarded_script_calls_it_on_launched_workers(script: Path, kind: str):
    done = ran(script, kind)
    assert done.returncode == 0, done.stderr
