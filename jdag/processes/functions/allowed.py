"""Allowlist of the functions and classes that messages may name.

A name `module:qualname` is looked up in the modules that the user allowed. An object is
accepted only under its own name: `mymodel:os.system` is not a function of mymodel. Also
allowed are optax, functions marked by `jdag.engine.functions.remote`, and the public
modules of JAX except for functions that read or write files or change settings. No
other module is ever imported. `__main__` is the script of
`jdag.processes.functions.script`.
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

# Modules that are always allowed.
MODULES = ("optax",)
# Public modules of JAX, allowed with their submodules.
PUBLIC = ("jax.numpy", "jax.nn", "jax.lax", "jax.scipy", "jax.random")
# Members of these modules that have side effects.
_EFFECTS = (
    *("fromfile", "load", "save", "savez", "printoptions", "set_printoptions"),
    *("from_dlpack", "frombuffer", "infeed", "outfeed"),
)
_TYPES = ("bool", "int", "float", "complex", "list", "tuple", "dict", "frozenset")


class Allowed:
    """Lookup of allowed functions and classes by name.

    Args:
        modules: dotted names of modules; their submodules are allowed too.
        load: whether to import modules; otherwise only imported modules are searched.

    Raises:
        JdagError: an entry is not a dotted name, or is a module of Python's own.
    """

    def __init__(self, modules: Sequence[str], *, load: bool = True) -> None:
        if isinstance(modules, str):
            raise JdagError(
                f"allow={modules!r}: it takes a list of names: [{modules!r}]"
            )
        for module in modules:
            if not isinstance(module, str) or not _is_dotted(module):
                raise JdagError(
                    f"allow has {module!r}: it takes names of modules, as 'a.b'"
                )
            if module.partition(".")[0] == "builtins":
                raise JdagError(f"allow has {module!r}: name modules of your own")
        self.modules = tuple(dict.fromkeys(modules))
        self._load = load

    def find(self, name: str) -> Any:
        """Return the function or class named `module:qualname`.

        A digest may follow, as `#digest`, with which loaded code is compared.

        Raises:
            JdagError: it is not allowed, does not exist, or has different code here;
                the text says what to do.
        """
        name, _, code = name.partition("#")
        known = public().get(name)
        if known is not None:
            return known
        module = name.partition(":")[0]
        if self._owns(module) or any(within(module, one) for one in MODULES):
            found = _found(name, self._load)
            if code and self._load:
                check_code(name, code, found)
            return found
        if within(module, "jdag") and "__" not in module:
            with suppress(JdagError):
                found = _found(name, self._load)
                if is_remote(found):
                    return found
        raise JdagError(self._refusal(name, module))

    def _owns(self, module: str) -> bool:
        return any(within(module, one) for one in self.modules)

    def _refusal(self, name: str, module: str) -> str:
        if module == MAIN or not _is_dotted(module):
            return refusal(name)
        top = module.partition(".")[0]
        allowed = ", ".join((*self.modules, *MODULES, *PUBLIC))
        return (
            f"{name} may not be had by name: allowed are functions of {allowed}; "
            f"start the worker with allow=[{top!r}] where it has that module"
        )


class AllImported(Allowed):
    """Allowlist of all that is imported here; of the script if MAIN is named."""

    def _owns(self, module: str) -> bool:
        if module in (MAIN, "builtins"):
            return module in self.modules and main_script() is not None
        return module in sys.modules


def _found(name: str, load: bool) -> Any:
    module, _, qualname = name.partition(":")
    parts = qualname.split(".")
    if not all(part.isidentifier() and part[:2] != "__" for part in parts):
        raise JdagError(
            f"{name} has no name that another process could find it by: it has to "
            "be a function or class at the top of its module, or in such a class"
        )
    space: Any = _module(module, load)
    for place, part in enumerate(parts):
        space = _member(space, part, f"{module}:{'.'.join(parts[: place + 1])}")
        if space is None:
            hint = f": workers skip what is under `{GUARD}`" if module == MAIN else ""
            raise JdagError(f"module {module!r} has no function or class {name}{hint}")
    return space


def missing(modules: Sequence[str]) -> list[str]:
    """Return the modules that are certainly not installed, without importing any.

    A module is missing if its top-level module is not found, or is not a package.
    """

    def is_missing(name: str) -> bool:
        top, _, below = name.partition(".")
        found = find_spec(top)
        return found is None or bool(below and found.submodule_search_locations is None)

    return [name for name in modules if name not in sys.modules and is_missing(name)]


def within(name: str, prefix: str) -> bool:
    """Whether a module is `prefix` or one of its submodules."""
    return name == prefix or name.startswith(prefix + ".")


def _is_dotted(module: str) -> bool:
    return all(part.isidentifier() for part in module.split("."))


def _module(name: str, load: bool) -> ModuleType:
    if not load:
        found = sys.modules.get(name)
        if found is None:
            raise JdagError(f"module {name!r} is not imported here")
        return found
    if name == MAIN:
        return main_module()
    # Not from sys.modules, where a module may still be half imported by another thread.
    try:
        return importlib.import_module(name)
    except Exception as error:  # Importing a module can raise anything.
        raise JdagError(
            f"module {name!r} is allowed here and cannot be imported: "
            f"{named_text(error)}"
        ) from error


def _member(space: Any, part: str, name: str) -> Any:
    """Return the callable that a module or class itself defines as `name`, or None."""
    found = vars(space).get(part) if isinstance(space, ModuleType | type) else None
    if isinstance(found, staticmethod):
        found = found.__func__
    elif isinstance(found, classmethod):
        found = found.__get__(None, space)
    return found if callable(found) and name_of(found) == name else None


@cache
def public() -> dict[str, Any]:
    """Return the public functions of JAX, and the types of numbers and containers."""
    found: dict[str, Any] = {}
    for name in PUBLIC:
        _add(found, importlib.import_module(name), name, {})
    kinds = [getattr(builtins, name) for name in _TYPES]
    types = [kind for kind in vars(np).values() if isinstance(kind, type)]
    kinds += [kind for kind in types if issubclass(kind, np.generic)]
    for kind in (*kinds, jtu.Partial):
        found[name_of(kind)] = kind
    return found


def _add(found: dict[str, Any], space: Any, name: str, seen: dict[int, None]) -> None:
    seen[id(space)] = None
    for key, value in vars(space).items():
        if key.startswith("_") or key in _EFFECTS:
            continue
        if isinstance(value, ModuleType):
            if within(value.__name__, name) and id(value) not in seen:
                _add(found, value, name, seen)
        elif callable(value) and within(str(getattr(value, "__module__", "")), "jax"):
            found.setdefault(name_of(value), value)
