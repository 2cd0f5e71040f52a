"""Facts about Python code: the names that it reads, what it may change, its text."""

import dis
import inspect
from functools import lru_cache
from hashlib import blake2b
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

# The types that count by value although they may change, with the methods that do so.
MUTABLE: dict[Any, tuple[str, ...]] = {
    list: ("append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"),
    dict: ("update", "setdefault", "pop", "popitem", "clear"),
    set: ("add", "update", "discard", "remove", "pop", "clear"),
    np.ndarray: ("fill", "put", "sort", "partition", "resize"),
}
_STORES = ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR")
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_HAS_DOC: int = getattr(inspect, "CO_HAS_DOCSTRING", 0)  # Of Python 3.13 and later.


class Facts(NamedTuple):
    """What code, with the code inside of it, reads and changes."""

    reads: tuple[str, ...]  # Globals, without those that it assigns.
    names: tuple[str, ...]  # Globals and attributes.
    changes: tuple[Any, ...]  # The types of MUTABLE that it may change in place.


@lru_cache(maxsize=4096)
def facts_of(code: CodeType) -> Facts:
    """Return what code reads and changes."""
    codes = [code]
    for one in codes:  # The list grows.
        codes.extend(const for const in one.co_consts if isinstance(const, CodeType))
    steps = [(s.opname, s.argval) for one in codes for s in dis.get_instructions(one)]
    reads = dict.fromkeys(name for step, name in steps if step in _LOADS)
    names = dict.fromkeys(name for one in codes for name in one.co_names)
    stores = any(step in _STORES for step, _ in steps)
    return Facts(
        tuple([name for name in reads if ("STORE_GLOBAL", name) not in steps]),
        tuple(names),
        tuple(k for k, ways in MUTABLE.items() if stores or {*ways} & names.keys()),
    )


@lru_cache(maxsize=4096)
def text_of(code: CodeType) -> str:
    """Describe what code does, but not its place nor its docstring.

    Of code that pytest has rewritten, with its assertions, the text is empty.
    """
    if any(name.startswith("@py") for name in code.co_names):
        return ""
    consts = list(code.co_consts)
    is_def = code.co_name[0] != "<" and code.co_flags & _HAS_DOC == _HAS_DOC
    if consts and is_def and isinstance(consts[0], str):
        consts[0] = None
    for place, const in enumerate(consts):
        if isinstance(const, CodeType):
            consts[place] = text_of(const)
            if not consts[place]:
                return ""
        elif isinstance(const, frozenset):
            consts[place] = sorted(map(repr, const))
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    names = (code.co_varnames, code.co_names, code.co_freevars, code.co_cellvars)
    does = (code.co_name, code.co_code, code.co_exceptiontable)
    return blake2b(repr((does, counts, names, consts)).encode()).hexdigest()
