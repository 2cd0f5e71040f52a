"""The laws of the source beyond those of ruff: sizes, homes, docstrings, order.

A law is a function from one module to its breaches. Each is held against every
module of jdag, and against sources that break it, so that we know that it bites.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from tests import ROOT
from tests.tools.tidy_cases import BREACHES, OBEDIENT

FILE_LINES_MAX = 499
FUNCTION_LINES_MAX = 69

# Where a library, or one of its functions, may be named.
HOMES = {
    "typer": ("cli",),
    "rich": ("cli", "plans.progress"),
    "tomllib": ("settings.toml_files",),
    "matplotlib": ("report",),
    "jinja2": ("report",),
    "pyarrow": ("lab.parquet",),
    "ray": ("processes.launch.on_ray",),
    "cryptography": ("processes.session.authority",),
    "optax": ("training.leafwise", "training.optimizer"),
    "safetensors": ("training",),
    "greenlet": ("sim",),
    "random": ("runtime.chooser", "lab.strategies"),
    "grpc": ("processes",),
    "socket": ("processes",),
    "threading": ("processes", "parallel.waiting", "sim.programs", "context.refs"),
    "time": ("processes", "parallel.waiting"),
    "secrets": ("processes",),
    "ctypes": ("processes",),
    "signal": ("processes",),
    "subprocess": ("processes", "cli", "lab.sweep_pool"),
    "jax.pmap": (),
    "jax.shard_map": ("parallel",),
    "jax.vjp": ("compute",),
    "jax.jvp": ("compute",),
    "hypothesis": ("testing.strategies",),
    "pytest": ("testing.plugin",),
    "numpy.random": (),
    "pickle": (),
}

# A name says what a thing is; `other` is the second operand of a special method.
NO_NOUNS = ("said", "made", "found", "there", "one", "of", "now", "gone")

# Packages whose names are public; what else a module defines is the house's own.
FACES = (".", "parallel", "schedules", "sim")
WHOLE = dict.fromkeys(
    (
        *("errors", "lab.strategies", "sim.presets", "sim.topologies"),
        *("testing.checks", "testing.drawn", "testing.strategies"),
    ),
    frozenset[str](),
)

# Pure modules know neither of these.
PURE = ("engine", "schedules", "wire.frames", "sim.reliable_link")
ARRAYS = ("jax", "jaxlib", "numpy")

# Built-ins that pass on the order of what they are given.
KEEPS_ORDER = ("list", "tuple", "iter", "enumerate", "zip", "map", "filter", "reversed")
# What a set's own method gives is a set again.
GIVES_SET = ("union", "intersection", "difference", "symmetric_difference", "copy")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return [*ast.walk(self.tree)]

    @cached_property
    def attributes_of_sets(self) -> dict[str, bool]:
        """Attributes that are declared or made as sets."""
        known: dict[str, bool] = {}
        for node in self.nodes:
            if isinstance(node, ast.AnnAssign | ast.Assign) and _makes_set(node, known):
                for target in _targets(node):
                    if isinstance(target, ast.Attribute):
                        known[ast.unparse(target)] = True
        return known

    @property
    def name(self) -> str:
        """The name below jdag: `wire.frames`; a folder's __init__ has the folder's."""
        parts = Path(self.path).with_suffix("").parts[1:]
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        return ".".join(parts)

    def at(self, node: ast.AST | int, said: str) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"{self.path}:{line}: {said}"


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def imports(module: Module) -> Iterator[tuple[ast.stmt, str, str]]:
    """Each import as (statement, dotted name of what it brings, name it binds)."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, alias.asname or alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}", alias.asname or alias.name


def mentions(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Each dotted name from outside that the module imports or reaches for."""
    bound = {}
    for statement, name, binding in imports(module):
        yield statement, name
        plain = isinstance(statement, ast.Import) and binding == name.split(".")[0]
        bound[binding] = binding if plain else name
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in bound:
                yield node, f"{bound[first]}.{rest}"


def functions(module: Module) -> Iterator[FunctionNode]:
    for node in module.nodes:
        if isinstance(node, FunctionNode):
            yield node


# The laws, each from a module to its breaches.


def a_file_has_fewer_than_500_lines(module: Module) -> Iterator[str]:
    lines = len(module.source.splitlines())
    if lines > FILE_LINES_MAX:
        yield module.at(lines, f"{lines} lines; at most {FILE_LINES_MAX}")


def a_function_has_fewer_than_70_lines(module: Module) -> Iterator[str]:
    for node in functions(module):
        assert node.end_lineno is not None, node
        lines = node.end_lineno - node.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            said = f"{node.name} has {lines} lines; at most {FUNCTION_LINES_MAX}"
            yield module.at(node, said)


def libraries_stay_at_home(module: Module) -> Iterator[str]:
    for node, name in mentions(module):
        for library, homes in HOMES.items():
            if within(name, library) and not any(
                within(module.name, home) for home in homes
            ):
                allowed = ", ".join(homes) or "nowhere in jdag"
                yield module.at(node, f"names {library}; its home: {allowed}")


def pure_modules_know_no_arrays(module: Module) -> Iterator[str]:
    if not any(within(module.name, pure) for pure in PURE):
        return
    for statement, name, _ in imports(module):
        if any(within(name, library) for library in ARRAYS):
            yield module.at(statement, f"{module.name} is pure and imports {name}")


@cache
def exported() -> dict[str, frozenset[str]]:
    """The names that packages export, by the module that defines them.

    All names of a module that is exported whole; none is listed then.
    """
    homes: dict[str, set[str]] = {}
    for face in FACES:
        path = f"jdag/{face}/__init__.py"
        source = (ROOT / path).read_text(encoding="utf-8")
        for _, name, _ in imports(Module(path, source)):
            home, _, export = name.removeprefix("jdag.").rpartition(".")
            if name.startswith("jdag.") and home not in ("", "gone"):
                homes.setdefault(home, set()).add(export)
    return {home: frozenset(names) for home, names in homes.items()} | WHOLE


def public_things_have_docstrings(module: Module) -> Iterator[str]:
    names = exported().get(module.name)
    if names is not None:
        public = [
            node
            for node in module.tree.body
            if isinstance(node, FunctionNode | ast.ClassDef)
            and (not names or node.name in names)
        ]
        yield from _undocumented(module, public, "")


def _undocumented(
    module: Module, body: Sequence[ast.stmt], owner: str
) -> Iterator[str]:
    for node in body:
        if not isinstance(node, FunctionNode | ast.ClassDef):
            continue
        if node.name.startswith("_") or _repeats_a_contract(node):
            continue
        if ast.get_docstring(node) is None:
            yield module.at(node, f"{owner}{node.name} is public and says nothing")
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(module, node.body, f"{owner}{node.name}.")


def _repeats_a_contract(node: FunctionNode | ast.ClassDef) -> bool:
    """Overloads, setters and overrides are documented where they began."""
    ends = [ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list]
    return any(end in ("overload", "setter", "override") for end in ends)


def names_are_nouns(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if not isinstance(node.ctx, ast.Store):
                continue
        elif isinstance(node, FunctionNode | ast.ClassDef):
            name = node.name
        else:
            continue
        if name.strip("_") in NO_NOUNS:
            yield module.at(node, f"{name} is no name: say what it is")


def sets_are_never_iterated(module: Module) -> Iterator[str]:
    for scope in [module.tree, *functions(module)]:
        known = _names_of_sets(module, scope)
        for node in _own_nodes(scope):
            for iterated in _iterated(node):
                if _is_set(iterated, known):
                    said = f"iterates over a set: {ast.unparse(iterated)}; sort it"
                    yield module.at(iterated, said)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of one scope, without those of the functions inside it."""
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, FunctionNode):
            todo.extend(ast.iter_child_nodes(node))


def _iterated(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.For(iter=iterated) | ast.AsyncFor(iter=iterated):
            yield iterated
        # A set made from a set has no order to lose.
        case ast.ListComp() | ast.GeneratorExp() | ast.DictComp():
            yield from (generator.iter for generator in node.generators)
        case ast.Call(func=ast.Name(id=name), args=args) if name in KEEPS_ORDER:
            yield from args
        case ast.Call(func=ast.Attribute(attr="join" | "extend"), args=args):
            yield from args
        case ast.Starred(value=value):
            yield value


def _names_of_sets(module: Module, scope: ast.AST) -> dict[str, bool]:
    """Names in scope, and attributes anywhere, that are declared or made as sets."""
    known = dict(module.attributes_of_sets)
    if isinstance(scope, FunctionNode):
        arguments = scope.args
        for argument in (
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
        ):
            if argument.annotation is not None and _says_set(argument.annotation):
                known[argument.arg] = True
    for node in sorted(_own_nodes(scope), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.AnnAssign | ast.Assign) and _makes_set(node, known):
            known.update({ast.unparse(target): True for target in _targets(node)})
    return known


def _targets(node: ast.AnnAssign | ast.Assign) -> list[ast.expr]:
    return [node.target] if isinstance(node, ast.AnnAssign) else node.targets


def _makes_set(node: ast.AnnAssign | ast.Assign, known: dict[str, bool]) -> bool:
    if isinstance(node, ast.AnnAssign):
        return _says_set(node.annotation)
    return _is_set(node.value, known)


def _says_set(annotation: ast.expr) -> bool:
    outer = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return ast.unparse(outer) in ("set", "frozenset", "AbstractSet", "Set")


def _is_set(node: ast.expr, known: dict[str, bool]) -> bool:
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.Call(func=ast.Attribute(value=value, attr=attr)):
            return attr in GIVES_SET and _is_set(value, known)
        case ast.BinOp(op=ast.BitOr() | ast.BitAnd() | ast.BitXor() | ast.Sub()):
            return _is_set(node.left, known) or _is_set(node.right, known)
        case ast.IfExp(body=body, orelse=orelse):
            return _is_set(body, known) or _is_set(orelse, known)
        case ast.Name() | ast.Attribute():
            return known.get(ast.unparse(node), False)
        case _:
            return False


def only_the_command_line_prints(module: Module) -> Iterator[str]:
    if within(module.name, "cli"):
        return
    for node in module.nodes:
        if isinstance(node, ast.Name) and node.id == "print":
            yield module.at(node, "prints; only cli.py does")


Law = Callable[[Module], Iterator[str]]
LAWS: tuple[Law, ...] = (
    a_file_has_fewer_than_500_lines,
    a_function_has_fewer_than_70_lines,
    libraries_stay_at_home,
    pure_modules_know_no_arrays,
    public_things_have_docstrings,
    names_are_nouns,
    sets_are_never_iterated,
    only_the_command_line_prints,
)
LAWS_OF_ALL_SOURCES: tuple[Law, ...] = (
    a_file_has_fewer_than_500_lines,
    a_function_has_fewer_than_70_lines,
)


@cache
def modules(folder: str) -> list[Module]:
    return [
        Module(path.relative_to(ROOT).as_posix(), path.read_text())
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def name_of(law: Law) -> str:
    return law.__name__


@pytest.mark.parametrize("law", LAWS, ids=name_of)
def test_in_every_module(law: Law):
    found = modules("jdag")
    assert found
    breaches = [breach for module in found for breach in law(module)]
    assert not breaches, "\n" + "\n".join(breaches)


@pytest.mark.parametrize("law", LAWS_OF_ALL_SOURCES, ids=name_of)
def test_in_every_test_and_benchmark(law: Law):
    found = modules("tests") + modules("paper")
    assert found
    breaches = [breach for module in found for breach in law(module)]
    assert not breaches, "\n" + "\n".join(breaches)


BY_NAME = {name_of(law): law for law in LAWS}


@pytest.mark.parametrize("law", BREACHES)
def test_the_law_bites(law: str):
    for path, source, line in BREACHES[law]:
        breaches = list(BY_NAME[law](Module(f"jdag/{path}", source)))
        assert breaches, f"{law} let pass:\n{source}"
        assert breaches[0].startswith(f"jdag/{path}:{line}: "), breaches


@pytest.mark.parametrize("law", OBEDIENT)
def test_the_law_leaves_right_sources_alone(law: str):
    for path, source in OBEDIENT[law]:
        assert list(BY_NAME[law](Module(f"jdag/{path}", source))) == []


def test_every_law_is_shown_to_bite():
    assert [law for law in BY_NAME if law not in BREACHES] == []
