"""Names of functions and classes: which may be had; nothing else is touched."""

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdag.api.cluster import run_here
from jdag.collectives.parts import added, copies, divided, joined
from jdag.compute.duals import seeded
from jdag.compute.refs import Reply
from jdag.engine.functions import name_of, transferred
from jdag.errors import JdagError
from jdag.processes.functions.allowed import Allowed, missing, public
from jdag.training import optimizer as optim
from jdag.training.leafwise import Leafwise
from tests.tools import names_cases
from tests.tools.error_texts import fails_with

HERE = Allowed(["tests.tools.names_cases"])
NOTHING = Allowed([])
OWN: tuple[Any, ...] = (
    *(Reply, Leafwise, run_here, seeded, transferred, added, copies, divided, joined),
    *(optim.stepped, optim.squared_norm, optim.squared_norms),
)


@pytest.mark.parametrize(
    "found",
    [
        *(names_cases.layer, names_cases._private, names_cases.jit),
        *(names_cases.clipped, names_cases.Colour, names_cases.program),
        *(names_cases.Frozen, names_cases.Frozen.doubled, names_cases.Frozen.fixed),
    ],
    ids=name_of,
)
def test_what_a_module_that_is_allowed_has_of_its_own_is_found(found: Any) -> None:
    assert HERE.find(name_of(found)) is found


def test_a_classmethod_is_found_bound_to_its_class() -> None:
    assert HERE.find("tests.tools.names_cases:Frozen.of") == names_cases.Frozen.of


@pytest.mark.parametrize(
    "found",
    [
        *(jnp.tanh, jnp.add, jnp.sum, jnp.float32, jnp.linalg.norm, jnp.fft.fft),
        *(jax.nn.relu, jax.nn.softmax, jax.nn.gelu, jax.lax.scan, jax.lax.add),
        *(jax.random.normal, jax.scipy.special.logsumexp, jax.scipy.linalg.solve),
        *(optax.softmax_cross_entropy, optax.apply_updates, np.float32, int),
        jax.tree_util.Partial,
    ],
    ids=name_of,
)
def test_what_everybody_needs_is_allowed_by_itself(found: Any) -> None:
    assert NOTHING.find(name_of(found)) is found


@pytest.mark.parametrize("name", [name_of(one) for one in OWN])
def test_what_jdag_itself_calls_is_there_and_has_that_very_name(name: str) -> None:
    assert name_of(NOTHING.find(name)) == name


OWN_MODULE = "tests.tools.names_cases"
ATTACKS = [
    # Through what a module imports, or holds under a name of its own.
    *[
        f"{OWN_MODULE}:{name}"
        for name in (
            *("os.system", "os", "sys", "sqrt", "system", "jnp", "alias", "impostor"),
            *("RAN.append", "jax.numpy.save"),
            # Through attributes that everything has.
            *("layer.__globals__", "layer.__class__", "layer.__code__"),
            *("Effect.__init__", "Effect.__subclasses__", "Effect.__setstate__"),
            "Frozen.__class__.__base__.__subclasses__",
            *("__builtins__", "__loader__"),
            # What has no name that says where it is.
            *("<lambda>", "_made.<locals>.inner", "inner", "nameless"),
            # Nothing of the kind.
            *("", "layer:layer", "layer.", "gone"),
        )
    ],
    *(OWN_MODULE, ":", "", ":layer", ".:layer"),
    *("tests..names_cases:layer", f"{OWN_MODULE}.:layer", "../tests:layer"),
    # Other modules.
    *("builtins:eval", "builtins:exec", "builtins:open", "builtins:__import__"),
    *("builtins:getattr", "builtins:type", "builtins:object", "os:system"),
    *("posix:system", "subprocess:Popen", "subprocess:run", "importlib:import_module"),
    *("tests:names_cases", "tests.names_casesx:layer"),
    "tests.unit.wire.test_specs:total",
    *("__main__:main", "functools:partial", "functools:reduce", "operator:attrgetter"),
    *("numpy:load", "numpy:save", "numpy:fromfile", "numpy:memmap", "ctypes:CDLL"),
    # JAX beyond what its public modules have.
    *("jax._src.lib:xla_client", "jax._src.core:eval_jaxpr", "jax._src.config:config"),
    "jax._src.numpy.lax_numpy:os",
    *("jax._src.numpy.lax_numpy:load", "jax.numpy:load", "jax.numpy:save"),
    *("jax._src.numpy.array_creation:fromfile", "jax.numpy:fromfile"),
    *("jax.numpy:savez", "jax.numpy:set_printoptions", "jax:pure_callback", "jax:jit"),
    *("jax._src.callback:pure_callback", "jax._src.callback:io_callback"),
    *("jax.experimental:io_callback", "jax.numpy:np.load", "jax.numpy.linalg:np"),
    *("jax._src.tree_util:register_pytree_node", "jax._src.debugging:callback"),
    # jdag beyond what its protocol needs.
    *("jdag.api.cluster:Cluster", "jdag.launch:launch", "jdag.api.cluster:simulate"),
    *("jdag.training.checkpoint:save", "jdag.engine.functions:Applied"),
    "jdag.processes.functions.allowed:Allowed",
    *("jdag.api.cluster:run_here.__wrapped__", "jdag.api.cluster:flatten"),
]


@pytest.mark.parametrize("name", ATTACKS)
def test_all_else_is_refused_and_nothing_of_it_runs(name: str) -> None:
    names_cases.RAN.clear()
    with pytest.raises(JdagError):
        HERE.find(name)
    assert not names_cases.RAN


def test_a_module_that_is_not_allowed_is_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "harmful.py").write_text("raise SystemExit('ran')\n")
    (tmp_path / "kindly").mkdir()
    (tmp_path / "kindly" / "__init__.py").write_text("raise SystemExit('ran')\n")
    (tmp_path / "kindly" / "inner.py").write_text("def f(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    near = Allowed(["kind", "kindly.other", "harm"])
    for name in ("harmful:f", "kindly:f", "kindly.inner:f", "harmful:os.system"):
        for allowed in (HERE, near):
            with fails_with(JdagError, "processes.may_not_be_had_by"):
                allowed.find(name)
    assert not {"harmful", "kindly", "kindly.inner"} & set(sys.modules)


def test_a_module_is_imported_when_its_first_function_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ownpackage"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("def f(x): return x\n")
    (folder / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = Allowed(["ownpackage"])
    with fails_with(JdagError, "processes.ownpackage_inner_is_not_imported"):
        Allowed(["ownpackage"], load=False).find("ownpackage.inner:f")
    assert "ownpackage" not in sys.modules
    found = own.find("ownpackage.inner:f")
    assert found(3) == 3
    assert Allowed(["ownpackage"], load=False).find("ownpackage.inner:f") is found
    with fails_with(JdagError, "processes.cannot_be_imported_zerodivisionerror"):
        own.find("ownpackage.broken:f")
    with fails_with(JdagError, "processes.cannot_be_imported_modulenotfounderror"):
        own.find("ownpackage.gone:f")
    there = ["ownpackage", "tests.tools.names_cases", "os.path"]
    nowhere = ["nowhere_at_all.x", "ast.py"]  # The second is the name of a file.
    assert missing([*there, *nowhere]) == nowhere


def test_a_refusal_says_what_to_do() -> None:
    with fails_with(JdagError, "processes.allow_tests_where_it_has"):
        NOTHING.find("tests.tools.names_cases:layer")
    with fails_with(JdagError, "processes.main_f_is_of_the"):
        HERE.find("__main__:f")
    with fails_with(JdagError, "processes.no_name_that_another_process"):
        HERE.find("tests.tools.names_cases:<lambda>")
    with fails_with(JdagError, "processes.tests_tools_names_cases_has"):
        HERE.find("tests.tools.names_cases:gone")


@pytest.mark.parametrize(
    "modules", ["tests", ["a b"], [3], ["a:f"], ["builtins"], [""]]
)
def test_what_is_no_module_cannot_be_allowed(modules: object) -> None:
    with fails_with(JdagError, "processes.allow"):
        Allowed(modules)  # type: ignore[arg-type]


def test_every_public_name_is_the_name_of_what_it_stands_for() -> None:
    assert len(public()) > 500
    for name, value in public().items():
        assert name_of(value) == name


def test_a_module_that_another_thread_is_importing_is_waited_for(tmp_path, monkeypatch):
    text = "import sys\nsys.begun.set()\nassert sys.go.wait(60)\ndef f(x): return x\n"
    (tmp_path / "halfway.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "begun", begun, raising=False)
    monkeypatch.setattr(sys, "go", go, raising=False)
    with ThreadPoolExecutor(2) as pool:
        imported = pool.submit(importlib.import_module, "halfway")
        assert begun.wait(60)
        found = pool.submit(Allowed(["halfway"]).find, "halfway:f")
        wait([found], timeout=0.2)  # Long enough for who does not wait.
        go.set()
        assert found.result(60) is imported.result(60).f
