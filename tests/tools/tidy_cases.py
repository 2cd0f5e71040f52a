"""Sources that break one law of test_tidy.py each, and sources that come close."""

LONG = "def long():\n" + "    x = 1\n" * 68
# By law: path below jdag, source, line of the breach.
BREACHES: dict[str, list[tuple[str, str, int]]] = {
    "a_file_has_fewer_than_500_lines": [
        ("runtime/trace.py", "x = 1\n" * 500, 500),
    ],
    "a_function_has_fewer_than_70_lines": [
        ("runtime/trace.py", LONG + "    x = 1\n", 1),
    ],
    "libraries_stay_at_home": [
        ("api/cluster.py", "import jax\nf = jax.shard_map(g)", 2),
        ("api/oracle.py", "import jax as j\nf = j.vjp(g, 1)", 2),
        ("api/oracle.py", "from jax import vjp", 1),
        ("scenario.py", "from rich.table import Table", 1),
        ("cli/commands.py", "import tomllib", 1),
        ("cli/commands.py", "import matplotlib.pyplot as plt", 1),
        ("api/oracle.py", "import optax", 1),
        ("engine/graph.py", "import random", 1),
        ("processes/run.py", "from greenlet import greenlet", 1),
        ("sim/run.py", "import time", 1),
        ("sim/run.py", "import threading", 1),
        ("training/optimizer.py", "from hypothesis import given", 1),
        ("wire/codec.py", "import pickle", 1),
        ("sim/run.py", "import numpy as np\nx = np.random.rand(3)", 2),
    ],
    "pure_modules_know_no_arrays": [
        ("engine/graph.py", "import numpy as np", 1),
        ("wire/frames.py", "from jax import jit", 1),
    ],
    "names_are_nouns": [
        ("runtime/trace.py", "def f(said):\n    return said", 1),
        ("runtime/trace.py", "for one in range(3): f(one)", 1),
    ],
    "public_things_have_docstrings": [
        ("context/refs.py", "def fetch(): ...", 1),
        ("errors.py", "class A: ...", 1),
        ("sim/faults.py", 'class Crash:\n    """A crash."""\n    def f(self): ...', 3),
    ],
    "sets_are_never_iterated": [
        ("sim/run.py", "for x in {1, 2, 3}: f(x)", 1),
        ("sim/run.py", "for x in set(y): f(x)", 1),
        ("sim/run.py", "z = [x for x in {y for y in a}]", 1),
        ("sim/run.py", "z = tuple(set(a) - b)", 1),
        ("sim/run.py", "z = [*frozenset(a)]", 1),
        ("sim/run.py", "def f(held: set[int]):\n    for x in held: g(x)", 2),
        (
            "wire/frames.py",
            "def f():\n    held = set()\n    for x in held | other: g(x)",
            3,
        ),
        (
            "engine/credit.py",
            "class A:\n    def __init__(self): self.owed: set[int] = f()\n"
            "    def g(self):\n        return list(self.owed)",
            4,
        ),
    ],
    "only_the_command_line_prints": [
        ("scenario.py", '"""One idea."""\nprint(1)', 2),
    ],
}
# By law: path, source; they come close and are right.
OBEDIENT: dict[str, list[tuple[str, str]]] = {
    "a_file_has_fewer_than_500_lines": [
        ("runtime/trace.py", "x = 1\n" * 499),
    ],
    "a_function_has_fewer_than_70_lines": [
        ("runtime/trace.py", LONG),
    ],
    "libraries_stay_at_home": [
        ("compute/pairs.py", "import jax\nf = jax.vjp(g)"),
        ("api/oracle.py", "import jax\nf = jax.jit(ref.vjp)"),
        ("scenario/mlp.py", "import jax\nk = jax.random.key"),
    ],
    "pure_modules_know_no_arrays": [
        ("wire/sizes.py", "import numpy"),
    ],
    "names_are_nouns": [
        ("runtime/trace.py", "message = 1"),
        ("runtime/trace.py", "count = other.of + found(one)"),
    ],
    "public_things_have_docstrings": [
        ("runtime/trace.py", "def f(): ..."),
        ("errors.py", "def _f(): ..."),
        ("sim/faults.py", "class Own: ..."),
    ],
    "sets_are_never_iterated": [
        ("sim/run.py", "for x in sorted({1, 2, 3}): f(x)"),
        ("sim/run.py", "z = {x for x in {1, 2, 3}}"),
        ("sim/run.py", "z = any(x in held for x in [1, 2])"),
    ],
    "only_the_command_line_prints": [
        ("cli/commands.py", "print(1)"),
    ],
}
