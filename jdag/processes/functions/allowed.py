"""Allowlist of the functions and classes that messages may name.

A name `module:qualname` is looked up in the modules that the user allowed. An object is
accepted only under its own name: `mymodel:os.system` is refused. Always allowed are
optax, functions marked by `jdag.engine.functions.remote`, and the public modules of JAX
except functions that access files or change settings. No other module is imported.
`__main__` is the script of `jdag.processes.functions.script`.
"""

import builtins
import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import jax.tree_util as jtu
import numpy as np

from jdag.engine.functions import is_remote, name_of
from jdag.errors import JdagError, named_text
from jdag.processes.functions.code_fingerprint import check_code
from jdag.processes.functions.script import (
    GUARD,
    MAIN,
    main_module,
    main_script,
    refusal,
)

# Always allowed.
MODULES = ("optax",)
# Public modules of JAX, allowed with their submodules.
PUBLIC = ("jax.numpy", "jax.nn", "jax.lax", "jax.scipy", "jax.random")
# Refused members of these modules: they have side effects.
_EFFECTS = (
    *("fromfile", "load", "save", "savez", "printoptions", "set_printoptions"),
    *("from_dlpack", "frombuffer", "infeed", "outfeed"),
)
_TYPES = ("bool", "int", "float", "complex", "list", "tuple", "dict", "frozenset")


class Allowed:
    """Look up allowed functions and classes by name.

    Args:
        modules: dotted names of modules; their submodules are allowed too.
        load: whether to import modules. With False, only modules that are already
            imported are searched.

    Raises:
        JdagError: an entry is not a dotted module name, or is `builtins`.
    """

    def __init__(self, modules: Sequence[str], *, load: bool = True) -> None:
        if isinstance(modules, str):
            raise JdagError(
                f"allow={modules!r}: expected a list of names, such as [{modules!r}]"
            )
        for module in modules:
            if not isinstance(module, str) or not _is_dotted(module):
                raise JdagError(
                    f"allow has {module!r}: expected module names, such as 'a.b'"
                )
            if module.partition(".")[0] == "builtins":
                raise JdagError(
                    f"allow has {module!r}: expected other modules than builtins"
                )
        self.modules = tuple(dict.fromkeys(modules))
        self._load = load

    def find(self, name: str) -> Any:
        """Return the function or class named `module:qualname`.

        If `#digest` follows the name, the loaded code must have that digest.

        Raises:
            JdagError: the name is not allowed or does not exist, or its code differs.
        """
        name, _, digest = name.partition("#")
        value = public().get(name)
        if value is not None:
            return value
        module = name.partition(":")[0]
        if self._allows(module) or any(within(module, top) for top in MODULES):
            value = _lookup(name, self._load)
            if digest and self._load:
                check_code(name, digest, value)
            return value
        if within(module, "jdag") and "__" not in module:
            with suppress(JdagError):
                value = _lookup(name, self._load)
                if is_remote(value):
                    return value
        raise JdagError(self._refusal(name, module))

    def _allows(self, module: str) -> bool:
        return any(within(module, top) for top in self.modules)

    def _refusal(self, name: str, module: str) -> str:
        if module == MAIN or not _is_dotted(module):
            return refusal(name)
        top = module.partition(".")[0]
        allowed = ", ".join((*self.modules, *MODULES, *PUBLIC))
        return (
            f"{name} is not in the allowlist: expected functions of {allowed}; "
            f"start the worker with allow=[{top!r}] if the module is installed there"
        )


class AllImported(Allowed):
    """Allows every imported module. If `modules` contains MAIN, allows the script."""

    def _allows(self, module: str) -> bool:
        if module in (MAIN, "builtins"):
            return module in self.modules and main_script() is not None
        return module in sys.modules


def _lookup(name: str, load: bool) -> Any:
    module, _, qualname = name.partition(":")
    parts = qualname.split(".")
    if not all(part.isidentifier() and part[:2] != "__" for part in parts):
        raise JdagError(
            f"{name} cannot be looked up by name in another process: expected a "
            "function or class at the top level of its module, or inside such a class"
        )
    scope: Any = _module(module, load)
    for index, part in enumerate(parts):
        scope = _member(scope, part, f"{module}:{'.'.join(parts[: index + 1])}")
        if scope is None:
            hint = f"; workers skip code under `{GUARD}`" if module == MAIN else ""
            raise JdagError(f"module {module!r} has no function or class {name}{hint}")
    return scope


def missing(modules: Sequence[str]) -> list[str]:
    """Return the modules that are certainly not installed, without importing any.

    Only the top-level package is checked, so missing submodules are not detected.
    """

    def is_missing(name: str) -> bool:
        top, _, submodule = name.partition(".")
        spec = find_spec(top)
        return spec is None or (
            submodule != "" and spec.submodule_search_locations is None
        )

    return [name for name in modules if name not in sys.modules and is_missing(name)]


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _is_dotted(module: str) -> bool:
    return all(part.isidentifier() for part in module.split("."))


def _module(name: str, load: bool) -> ModuleType:
    if not load:
        module = sys.modules.get(name)
        if module is None:
            raise JdagError(f"module {name!r} is not imported in this process")
        return module
    if name == MAIN:
        return main_module()
    # sys.modules may hold a module that another thread has not finished importing.
    try:
        return importlib.import_module(name)
    except Exception as error:  # An import can raise anything.
        raise JdagError(
            f"the allowed module {name!r} cannot be imported: {named_text(error)}"
        ) from error


def _member(scope: Any, part: str, name: str) -> Any:
    """Return the callable that a module or class defines as `name`, or None."""
    value = vars(scope).get(part) if isinstance(scope, ModuleType | type) else None
    if isinstance(value, staticmethod):
        value = value.__func__
    elif isinstance(value, classmethod):
        value = value.__get__(None, scope)
    return value if callable(value) and name_of(value) == name else None


@cache
def public() -> dict[str, Any]:
    """Return the public functions of JAX and the types of numbers and containers."""
    functions: dict[str, Any] = {}
    for name in PUBLIC:
        _add(functions, importlib.import_module(name), name, {})
    kinds = [getattr(builtins, name) for name in _TYPES]
    types = [kind for kind in vars(np).values() if isinstance(kind, type)]
    kinds += [kind for kind in types if issubclass(kind, np.generic)]
    for kind in (*kinds, jtu.Partial):
        functions[name_of(kind)] = kind
    return functions


def _add(
    functions: dict[str, Any], scope: Any, name: str, seen: dict[int, None]
) -> None:
    seen[id(scope)] = None
    for key, value in vars(scope).items():
        if key.startswith("_") or key in _EFFECTS:
            continue
        if isinstance(value, ModuleType):
            if within(value.__name__, name) and id(value) not in seen:
                _add(functions, value, name, seen)
        elif callable(value) and within(str(getattr(value, "__module__", "")), "jax"):
            functions.setdefault(name_of(value), value)
