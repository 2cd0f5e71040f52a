"""One side of `same_bits`: run programs and record the bits that they fetch.

It uses only the public face of jdag, so that it runs with earlier and later versions.

    python -m tests.tools.same_bits_child KIND DRIVER OUT ARGUMENT...

    scenario DRIVER OUT FILE         a scenario
    document DRIVER OUT FILE         the Python blocks of a document, in order
    random   DRIVER OUT FIRST END    random programs, in both modes
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import io
import json
import re
import runpy
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import greenlet
import jax
import numpy as np

import jdag
from tests.tools import same_bits_plan as plans
from tests.tools.documents import blocks_of
from tests.tools.random_hooks import numbered
from tests.tools.random_source import source_of

READY_S = 600.0  # The machine may be busy.
WORKERS = ("a", "b", "c", "d")
# Figures of a scenario that are made of numbers computed, not of sizes and times.
COMPUTED = re.compile("bit|loss|accuracy|gradient|d_t1|d_t2")

ARRAYS = (jax.Array, np.ndarray, np.generic, int, float)
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
Record = tuple[str, str]  # What it is, and its value or a digest of its bits.


class Recorder:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self._fetch = jdag.fetch  # Without recording.
        self._depth = 0

    def taken(self) -> list[Record]:
        records, self.records = self.records, []
        return records

    def note(self, name: str, tree: Any) -> None:
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        for path, leaf in leaves:
            what, said = f"{name}{jax.tree_util.keystr(path)}", type(leaf).__name__
            if isinstance(leaf, ARRAYS):
                array = np.asarray(_bits_of(leaf))
                what += f" {array.dtype}{list(array.shape)}"
                said = hashlib.sha256(array.tobytes()).hexdigest()[:16]
            self.records.append((what, said))

    def recording(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that records what it returns, arrays in place of refs."""

        @functools.wraps(fn)  # Workers compare the names of what a program uses.
        def recorded(*args: Any, **kwargs: Any) -> Any:
            is_main = _is_main()
            self._depth += is_main
            try:
                result = fn(*args, **kwargs)
                if is_main and self._depth == 1:
                    self.note(name, self._fetch(result))
                return result
            finally:
                self._depth -= is_main

        return recorded

    def install(self) -> None:
        _replace(self._fetch, self.recording("fetch", self._fetch))
        for make in (jdag.value_and_grad, jdag.hvp):
            _replace(make, self._maker(make))
        for kind, name in (
            (jdag.Ref, "fetch"),
            (jdag.Context, "gradient"),
            (jdag.Cluster, "run"),
        ):
            setattr(kind, name, self.recording(name, getattr(kind, name)))

    def _maker(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            return self.recording(make.__name__, make(*args, **kwargs))

        return made


def _bits_of(leaf: Any) -> Any:
    is_key = str(getattr(leaf, "dtype", "")).startswith("key")
    return jax.random.key_data(leaf) if is_key else leaf


def _is_main() -> bool:
    """Whether the main program calls this, not one that runs on a worker."""
    is_thread = threading.current_thread() is threading.main_thread()
    return is_thread and greenlet.getcurrent().parent is None


def _replace(original: Any, other: Any) -> None:
    """Put one function in the place of another in all modules of jdag."""
    for module in [m for name, m in sys.modules.items() if name.startswith("jdag")]:
        for name in [name for name, one in vars(module).items() if one is original]:
            setattr(module, name, other)


@contextlib.contextmanager
def noted(found: dict[str, Any], name: str, recorder: Recorder) -> Iterator[None]:
    error = None
    try:
        yield
    except (Exception, SystemExit) as raised:
        error = traceback.format_exception_only(raised)[-1].strip()[:300]
    finally:
        found[name] = {"records": recorder.taken(), "error": error}


def scenario(driver: str, recorder: Recorder, file: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    said, complaint = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--json", "--driver", driver, "--out", f"{folder}/run"]
        sys.argv = ["jdag", "run", file, *options]
        name = f"scenario {Path(file).stem}"
        with (
            noted(found, name, recorder),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(complaint),
        ):
            runpy.run_module("jdag", run_name="__main__", alter_sys=False)
    result = found[name]
    if not said.getvalue().strip():
        return {name: {"records": [], "error": complaint.getvalue().strip()[-300:]}}
    figures = json.loads(said.getvalue())["figures"]
    result["error"] = None  # Whether figures are as expected is not asked here.
    result["records"] += [
        (f"figure {key}", str(value))
        for key, value in figures.items()
        if COMPUTED.search(key)
    ]
    return found


def _is_of_arrays(value: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, ARRAYS) for leaf in leaves)


def document(driver: str, recorder: Recorder, file: str) -> dict[str, Any]:
    """Run the blocks of a document, on processes in place of simulated workers."""
    found: dict[str, Any] = {}
    page = Path(file)
    runnable = [each for each in blocks_of(page, page.parent) if each.not_run is None]
    blocks = [each.text for each in runnable if each.language == "python"]
    space: dict[str, Any] = {}
    for number, block in enumerate(blocks, 1):
        name = f"block{number}"
        _write_definitions(name, block, f"block{number - 1}" if number > 1 else "")
        module = sys.modules[name] = ModuleType(name)
        space = vars(module) | {**space, "__name__": name}
        vars(module).update(space)
        allow = [f"block{n}" for n in range(1, number + 1)]
        launch = functools.partial(jdag.launch, allow=allow)
        if driver == "rpc":
            vars(jdag)["simulate"] = lambda workers, launch=launch, **_: launch(workers)
        before, said = dict(space), io.StringIO()
        title = f"{page.name} {number}: {block.strip().partition(chr(10))[0]}"
        with tempfile.TemporaryDirectory() as folder, noted(found, title, recorder):
            with contextlib.chdir(folder), contextlib.redirect_stdout(said):
                exec(compile(block, page.name, "exec"), vars(module))
            space = dict(vars(module))
            for name, value in space.items():
                if value is not before.get(name) and _is_of_arrays(value):
                    recorder.note(name, value)
            if not recorder.records:  # Else what it prints may be a count or size.
                recorder.records.append(("output", said.getvalue()))
    return found


def _write_definitions(name: str, block: str, former: str) -> None:
    """Write a module in which workers find the functions of a block by name."""
    kept = [part for part in ast.parse(block).body if isinstance(part, DEFINITIONS)]
    lines = [f"from {former} import *"] * bool(former) + list(map(ast.unparse, kept))
    Path(f"{name}.py").write_text("\n".join(lines) + "\n")


def random(driver: str, recorder: Recorder, first: str, end: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    drawn = {n: numbered(n, WORKERS) for n in range(int(first), int(end))}
    sources = {number: source_of(plan) for number, plan in drawn.items()}
    folder = Path("plans")
    folder.mkdir(exist_ok=True)
    for number, source in sources.items():
        plans.write(folder, number, source.text)
    with contextlib.ExitStack() as stack:
        cluster: Any = None
        if driver == "rpc":
            allow = ["plans", "tests"]
            cluster = stack.enter_context(jdag.launch(WORKERS, allow=allow))
        for number, mode in product(drawn, ("smart", "fast")):
            plan, passes = drawn[number], sources[number].passes
            with noted(found, f"random {number} {mode}", recorder):
                run = importlib.import_module(f"plans.plan{number}").main
                if driver == "rpc":
                    ended = plans.play(cluster, plan, passes, run, mode)
                else:
                    with jdag.simulate(WORKERS, seed=number, home=plan.home) as made:
                        ended = plans.play(made, plan, passes, run, mode)
                recorder.records.append(("passes", " ".join(ended)))
    return found


PLAYS: dict[str, Callable[..., dict[str, Any]]] = {
    "scenario": scenario,
    "document": document,
    "random": random,
}


def main(kind: str, driver: str, out: str, *arguments: str) -> None:
    recorder = Recorder()
    recorder.install()
    vars(jdag)["launch"] = functools.partial(jdag.launch, ready_s=READY_S)
    place = Path(out).absolute()
    place.write_text(json.dumps(PLAYS[kind](driver, recorder, *arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
