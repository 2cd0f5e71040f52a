"""Sources that break one law of test_tidy.py each, and sources that come close."""

# Sources that break one law each: law, path, source, line of the breach.
DOC = '"""One idea."""\n'
BREACHES: tuple[tuple[str, str, str, int], ...] = (
    ("a_file_has_fewer_than_500_lines", "jdag/runtime/trace.py", "x = 1\n" * 500, 500),
    (
        "a_function_has_fewer_than_70_lines",
        "jdag/runtime/trace.py",
        "def long():\n" + "    x = 1\n" * 69,
        1,
    ),
    (
        "a_line_has_at_most_88_columns",
        "jdag/runtime/trace.py",
        "x = 1\n# " + "x" * 87,
        2,
    ),
    ("relative_imports_are_not_used", "jdag/sim/run.py", "from . import queue", 1),
    (
        "libraries_stay_at_home",
        "jdag/api/cluster.py",
        "import jax\nf = jax.shard_map(g)",
        2,
    ),
    (
        "libraries_stay_at_home",
        "jdag/api/oracle.py",
        "import jax as j\nf = j.vjp(g, 1)",
        2,
    ),
    ("libraries_stay_at_home", "jdag/api/oracle.py", "from jax import vjp", 1),
    ("libraries_stay_at_home", "jdag/scenario.py", "from rich.table import Table", 1),
    ("libraries_stay_at_home", "jdag/cli/commands.py", "import tomllib", 1),
    (
        "libraries_stay_at_home",
        "jdag/cli/commands.py",
        "import matplotlib.pyplot as plt",
        1,
    ),
    ("libraries_stay_at_home", "jdag/api/oracle.py", "import optax", 1),
    ("libraries_stay_at_home", "jdag/engine/graph.py", "import random", 1),
    (
        "libraries_stay_at_home",
        "jdag/processes/run.py",
        "from greenlet import greenlet",
        1,
    ),
    ("libraries_stay_at_home", "jdag/sim/run.py", "import time", 1),
    ("libraries_stay_at_home", "jdag/sim/run.py", "import threading", 1),
    (
        "libraries_stay_at_home",
        "jdag/training/optimizer.py",
        "from hypothesis import given",
        1,
    ),
    ("libraries_stay_at_home", "jdag/wire/codec.py", "import pickle", 1),
    (
        "libraries_stay_at_home",
        "jdag/sim/run.py",
        "import numpy as np\nx = np.random.rand(3)",
        2,
    ),
    ("pure_modules_know_no_arrays", "jdag/engine/graph.py", "import numpy as np", 1),
    ("pure_modules_know_no_arrays", "jdag/wire/frames.py", "from jax import jit", 1),
    ("a_module_says_its_idea_in_one_sentence", "jdag/sim/__init__.py", "", 1),
    (
        "a_module_says_its_idea_in_one_sentence",
        "jdag/runtime/trace.py",
        '"""A trace"""',
        1,
    ),
    ("public_things_have_docstrings", "jdag/context/refs.py", "def fetch(): ...", 1),
    ("public_things_have_docstrings", "jdag/errors.py", "class A: ...", 1),
    (
        "public_things_have_docstrings",
        "jdag/sim/faults.py",
        'class Crash:\n    """A crash."""\n    def f(self): ...',
        3,
    ),
    ("sets_are_never_iterated", "jdag/sim/run.py", "for x in {1, 2, 3}: f(x)", 1),
    ("sets_are_never_iterated", "jdag/sim/run.py", "for x in set(y): f(x)", 1),
    (
        "sets_are_never_iterated",
        "jdag/sim/run.py",
        "z = [x for x in {y for y in a}]",
        1,
    ),
    ("sets_are_never_iterated", "jdag/sim/run.py", "z = tuple(set(a) - b)", 1),
    ("sets_are_never_iterated", "jdag/sim/run.py", "z = [*frozenset(a)]", 1),
    (
        "sets_are_never_iterated",
        "jdag/sim/run.py",
        "def f(held: set[int]):\n    for x in held: g(x)",
        2,
    ),
    (
        "sets_are_never_iterated",
        "jdag/wire/frames.py",
        "def f():\n    held = set()\n    for x in held | other: g(x)",
        3,
    ),
    (
        "sets_are_never_iterated",
        "jdag/engine/credit.py",
        "class A:\n    held: set[int]\n"
        "    def __init__(self): self.owed: set[int] = f()\n"
        "    def g(self):\n        return list(self.owed)",
        5,
    ),
    ("only_the_command_line_prints", "jdag/scenario.py", DOC + "print(1)", 2),
)
# Sources that come close and are right.
OBEDIENT: tuple[tuple[str, str, str], ...] = (
    ("a_file_has_fewer_than_500_lines", "jdag/runtime/trace.py", "x = 1\n" * 499),
    (
        "a_function_has_fewer_than_70_lines",
        "jdag/runtime/trace.py",
        "def long():\n" + "    x = 1\n" * 68,
    ),
    ("a_line_has_at_most_88_columns", "jdag/runtime/trace.py", "x" * 88),
    ("libraries_stay_at_home", "jdag/compute/pairs.py", "import jax\nf = jax.vjp(g)"),
    (
        "libraries_stay_at_home",
        "jdag/api/oracle.py",
        "import jax\nf = jax.jit(ref.vjp)",
    ),
    (
        "libraries_stay_at_home",
        "jdag/scenario/mlp.py",
        "import jax\nk = jax.random.key",
    ),
    ("pure_modules_know_no_arrays", "jdag/wire/sizes.py", "import numpy"),
    ("public_things_have_docstrings", "jdag/runtime/trace.py", "def f(): ..."),
    ("public_things_have_docstrings", "jdag/errors.py", "def _f(): ..."),
    ("public_things_have_docstrings", "jdag/sim/faults.py", "class Own: ..."),
    ("sets_are_never_iterated", "jdag/sim/run.py", "for x in sorted({1, 2, 3}): f(x)"),
    ("sets_are_never_iterated", "jdag/sim/run.py", "z = {x for x in {1, 2, 3}}"),
    (
        "sets_are_never_iterated",
        "jdag/sim/run.py",
        "z = any(x in held for x in [1, 2])",
    ),
    ("only_the_command_line_prints", "jdag/cli/commands.py", "print(1)"),
)
