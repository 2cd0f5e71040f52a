"""Runs programs on real workers under injected faults, drawn from a seed.

    python -m paper.chaos                      an hour, and 10,000 steps
    python -m paper.chaos --minutes 8 --seed 3 --modes tls

A round connects three workers, runs a program repeatedly, and injects faults: it kills
or freezes a process, fills its disk, cuts, slows, holds or refuses its streams, or
dials it without credentials. Half of the rounds have up to eight faults that end within
the deadline, mostly cuts of streams. These faults must have no effect: there must be no
error, and the results must have the bits of an undisturbed run. The other rounds have
up to three permanent faults. These may end the program with an error that names a
worker, within the deadline. Then all faults end, and in the same session the program
must produce the right bits and leave no context, pass, connection, shared memory or
descriptor. In some rounds with TLS a worker has an untrusted certificate and must not
be able to join.

`paper/results/chaos.json` contains each round and `chaos.md` a table. Both are written
after each round. A round that hangs counts as wrong. It ends the campaign, which then
prints the stacks of all threads.
"""

import argparse
import faulthandler
import gc
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp

from jdag.errors import JdagError, JoinError, text_of
from paper.chaos_left import ends, kinds, opened
from paper.chaos_pool import DEADLINE_S, LONG, MODES, NAMES, PASSING, Pool
from paper.chaos_programs import PROGRAMS, Program, bits_of, fresh, programs_in, train
from paper.failures import children
from paper.figures import RESULTS, machine

HURT_S = 2.0
BREATH_S = 0.3  # The time between two temporary faults.
SLACK_S = 10.0  # The time beyond the deadline that a busy machine may need.
HEALED_S = 60.0
LEFT_S = 20.0  # A worker that is dialing a peer may continue until its deadline.
SETTLES_S = 3.0  # Resources that are freed after the first count hide leaks.
HANGS_S = 150.0
UNKNOWN: dict[str, Any] = {
    "program": "",
    "outcome": "unknown",
    "runs": 0,
    "faults": [],
    "wrong": [],
}
PASSING_SHARE, PASSING_MAX, LASTING_MAX = 0.5, 8, 3
STRANGE_SHARE = 0.1
BLOCK, GROWTH_MIB_MAX = 100, 8.0


class Trouble(threading.Thread):
    """Injects faults at planned times of a round, and records them in `done`."""

    def __init__(
        self,
        pool: Pool,
        rng: Random,
        faults: Sequence[str],
        at: Sequence[float],
        *,
        passes: bool,
    ) -> None:
        super().__init__(daemon=True)
        self._pool, self._rng, self._passes = pool, rng, passes
        self._plan = [
            (s, rng.choice(faults), rng.choice(NAMES[1:])) for s in sorted(at)
        ]
        self._over = threading.Event()
        self.done: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.begun = time.monotonic()
        self.start()

    def run(self) -> None:
        try:
            for planned_s, fault, victim in self._plan:
                if self._over.wait(max(0.0, self.begun + planned_s - time.monotonic())):
                    return
                at_s = time.monotonic() - self.begun
                lasts_s = self._pool.faults[fault](victim, self._rng)
                if self._passes and lasts_s == LONG:
                    lasts_s = self._rng.uniform(0.05, DEADLINE_S / 4)
                is_long = lasts_s == LONG
                one = {"fault": fault, "victim": victim, "at_s": at_s, "long": is_long}
                self.done.append(one)
                if not is_long and lasts_s:
                    self._over.wait(lasts_s)
                    self._pool.mend(fault, victim)
                    # Without a pause, consecutive faults could exceed the deadline.
                    self._over.wait(BREATH_S)
        except ProcessLookupError:  # An earlier fault has killed the process.
            pass
        except Exception as error:
            self.failed.append(f"the campaign itself: {error!r}")

    def end(self) -> None:
        """Stop injecting faults."""
        self._over.set()
        self.join()


@contextmanager
def watched(found: dict[str, Any], write: Callable[[], None]) -> Iterator[None]:
    """If the `with` block hangs, write the results and exit this process."""

    def hangs() -> None:
        found["wrong"] = [f"hangs for {HANGS_S:g} s"]
        write()
        faulthandler.dump_traceback()
        os._exit(1)

    timer = threading.Timer(HANGS_S, hangs)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(
        HANGS_S + SLACK_S, exit=True
    )  # Ends the process if `hangs` itself hangs.
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def hurt(cluster: Any, program: Program, bits: str, trouble: Trouble) -> dict[str, Any]:
    """Run a program repeatedly under faults. Returns how it ended."""
    found: dict[str, Any] = {"outcome": "finished", "wrong": [], "runs": 0}
    try:
        while trouble.is_alive() or not found["runs"]:
            found["runs"] += 1
            if program(cluster) != bits:
                found["wrong"].append("other bits")
    except JdagError as error:
        found |= {"outcome": type(error).__name__, "said": text_of(error)[:1000]}
    except Exception as error:
        found |= {"outcome": type(error).__name__, "said": text_of(error)[:1000]}
        found["wrong"].append("an error that is not jdag's")
    ended_s = time.monotonic() - trouble.begun
    trouble.end()
    found["wrong"] += trouble.failed
    lasting = [one for one in trouble.done if one["long"]]
    if found["outcome"] != "finished":
        if not lasting:
            found["wrong"].append("an error by faults that pass")
        else:
            found["seconds"] = ended_s - lasting[0]["at_s"]
            if found["seconds"] > DEADLINE_S + SLACK_S:
                found["wrong"].append("an error after the deadline")
        victims = [f"'{one['victim']}'" for one in lasting if one["fault"] != "fill"]
        has_full = len(victims) < len(lasting)
        if not has_full and not any(name in found["said"] for name in victims):
            found["wrong"].append("an error that names no worker that was hurt")
    return found | {"faults": trouble.done}


def healed(cluster: Any, program: Program, bits: str) -> list[str]:
    """Check that the program succeeds again after all faults. Returns the errors."""
    due = time.monotonic() + HEALED_S
    while True:
        try:
            if program(cluster) != bits:
                return ["other bits after it was mended"]
            break
        except JdagError as error:
            if time.monotonic() > due:
                return [f"not well after it was mended: {text_of(error)[:1000]}"]
            time.sleep(0.2)
    held: dict[str, Any] = {}
    while time.monotonic() < due:  # Contexts and passes end with a delay.
        info = cluster.info()
        held = {
            f"{worker}: {what} {one[what]}": one[what]
            for worker, one in info.items()
            for what in ("live_contexts", "live_passes")
        }
        if not any(held.values()):
            return []
        time.sleep(0.1)
    return [text for text, count in held.items() if count]


def segments() -> list[str]:
    """Return the shared memory segments of jdag on this host."""
    return sorted(str(path) for path in Path("/dev/shm").glob("*jdag*"))


def left(before: list[str]) -> list[str]:
    """Return the resources that closed sessions have not freed.

    The proxies run in this process, so sockets between workers are counted too.
    """
    due = time.monotonic() + LEFT_S
    while True:
        gc.collect()  # Frees arrays without references, and their shared memory.
        now = opened()
        more = kinds(now)
        more.subtract(kinds(before))
        found = segments() + [f"{n} more {what}" for what, n in more.items() if n > 0]
        if not found:
            return found
        if time.monotonic() > due:
            new = {*now} - {*before}
            return found + [text for one, text in ends().items() if one in new]
        time.sleep(0.05)


def strange_round(pool: Pool, rng: Random) -> dict[str, Any]:
    """Try to join with a worker whose certificate is untrusted; expect an error."""
    victim = rng.choice(NAMES[1:])
    pool.start(victim, strange=True)
    begun, wrong = time.monotonic(), []
    try:
        pool.connect().close()
        wrong.append("joined with a stranger")
        said = ""
    except JoinError as error:
        said = text_of(error)
        if f"'{victim}'" not in said or "TLS" not in said:
            wrong.append("the error names neither the worker nor TLS")
    seconds = time.monotonic() - begun
    if seconds > DEADLINE_S + SLACK_S:
        wrong.append("an error after the deadline")
    pool.start(victim)
    fault = {"fault": "certificate", "victim": victim, "at_s": 0.0, "long": True}
    return {
        **{"program": "connect", "outcome": "JoinError", "said": said},
        **{"seconds": seconds, "faults": [fault], "wrong": wrong, "runs": 1},
    }


def one_round(
    pool: Pool,
    rng: Random,
    programs: dict[str, Program],
    quiet: dict[str, str],
    before: list[str],
    one: dict[str, Any],
) -> None:
    """Run a session: faults, recovery, closing. Results are added to `one`."""
    if pool.mode == "tls" and rng.random() < STRANGE_SHARE:
        one |= strange_round(pool, rng)
        return
    name = rng.choice(list(programs))
    passes = rng.random() < PASSING_SHARE
    faults = list(pool.faults)
    if passes:
        faults = [one for one in PASSING if one in pool.faults]
    count = rng.randint(1, PASSING_MAX if passes else LASTING_MAX)
    cuts = pool.cuts
    with pool.connect() as cluster:
        moments = [rng.uniform(0, HURT_S) for _ in range(count)]
        trouble = Trouble(pool, rng, faults, moments, passes=passes)
        one |= {"program": name, "passes": passes, "faults": trouble.done}
        one |= hurt(cluster, programs[name], quiet[name], trouble)
        pool.heal()
        one["wrong"] += healed(cluster, programs[name], quiet[name])
        one["cuts"] = pool.cuts - cuts
        one["resends"] = sum(of["resends"] for of in cluster.info().values())
    begun = time.monotonic()
    one["wrong"] += left(before)
    one["gone_s"] = round(time.monotonic() - begun, 2)


def resident_mib(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def steady(
    pool: Pool,
    steps: int,
    rng: Random,
    found: dict[str, Any],
    write: Callable[[], None],
) -> None:
    """Train for many steps while streams are cut; record the memory in `found`."""
    pids = {NAMES[0]: os.getpid(), **{name: pool.pid(name) for name in NAMES[1:]}}
    memory: dict[str, list[float]] = {name: [] for name in pids}
    wrong, x, cuts = [], jnp.linspace(1.0, 2.0, 64), pool.cuts
    bits: dict[str, None] = {}
    blocks = max(10, steps // BLOCK)
    with pool.connect() as cluster:
        for block in range(blocks):
            trouble = Trouble(pool, rng, ["cut"], [0.0] * (block % 2), passes=True)
            found |= {"block": block, "faults": trouble.done}
            with watched(found, write):
                leaves = fresh(cluster, 64)
                train(cluster, leaves, x, steps // blocks)
                bits[bits_of(leaves)] = None
                trouble.end()
            if block % (blocks // 10) == blocks // 10 - 1:
                for name, pid in pids.items():
                    memory[name].append(round(resident_mib(pid), 1))
    if len(bits) != 1:
        wrong.append(f"{len(bits)} patterns of bits in {blocks} equal trainings")
    growth = {name: round(max(of[2:]) - of[1], 1) for name, of in memory.items()}
    if max(growth.values()) > GROWTH_MIB_MAX:
        wrong.append(f"memory grows by {growth} MiB")
    found |= {"steps": steps, "cuts": pool.cuts - cuts, "wrong": wrong}
    found |= {"resident_mib": memory, "growth_mib": growth}


def campaign(
    modes: Sequence[str],
    wanted: Sequence[str],
    seconds: float,
    steps: int,
    seed: int,
    out: Path,
) -> dict[str, Any]:
    """Run all rounds, and write the results after each round."""
    results: dict[str, Any] = {"machine": machine(), "seed": seed, "rounds": []}
    results |= {"deadline_s": DEADLINE_S, "left": []}
    begun = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)

    def write(found: dict[str, Any]) -> None:
        print(found.get("mode"), found.get("program"), found["wrong"], flush=True)
        results["seconds"] = round(time.monotonic() - begun)
        (out / "chaos.json").write_text(json.dumps(results, indent=1) + "\n")
        (out / "chaos.md").write_text(page(results))

    before = children()
    with tempfile.TemporaryDirectory() as folder:
        programs, allow = programs_in(Path(folder), wanted)
        quiet: dict[str, str] = {}
        for mode in modes:
            (Path(folder) / mode).mkdir()
            pool = Pool(mode, Path(folder) / mode, seed, allow)
            rng = Random(f"{seed} {mode}")
            try:
                with pool.connect() as cluster:
                    for name, program in programs.items():
                        found = program(cluster)
                        if quiet.setdefault(name, found) != found:
                            raise SystemExit(f"{mode}: other bits of {name}, unhurt")
                time.sleep(SETTLES_S)
                first = opened()
                due, number = time.monotonic() + seconds / len(modes), 0
                while time.monotonic() < due:
                    one = {"mode": mode, "number": number, **UNKNOWN}
                    results["rounds"].append(one)
                    with watched(one, partial(write, one)):
                        try:
                            one_round(pool, rng, programs, quiet, first, one)
                        except JdagError as error:  # Raised when joining or leaving.
                            one["wrong"] = [*one["wrong"], text_of(error)]
                            pool.heal()
                    write(one)
                    number += 1
                if mode == modes[-1] and steps:
                    one = results["steady"] = {"mode": mode, "program": "steps"}
                    steady(pool, steps, rng, one, partial(write, one))
                    write(one)
            finally:
                pool.close()
    results["left"] = [f"process {one}" for one in sorted(children() - before)]
    results["left"] += segments()
    write({"wrong": results["left"]})
    return results


def page(results: dict[str, Any]) -> str:
    """Return the results of a campaign as a page in Markdown."""
    rounds, here = results["rounds"], results["machine"]
    wrong = sum(bool(one["wrong"]) for one in rounds)
    lines = [
        "# Workers hurt in every way",
        "",
        f"`make chaos`, {results['seconds'] / 60:.0f} minutes, seed {results['seed']}: "
        f"{len(rounds)} rounds, {wrong} of them wrong; deadline {DEADLINE_S:g} s; "
        f"{here['cores']} cores, Python {here['python']}, JAX {here['jax']}.",
        "`paper/chaos.py` describes a round and its correct results.",
        "",
        f"The time of an error counts from the first permanent fault. An error may "
        f"come up to {SLACK_S:g} s after the deadline, since a program may end by a "
        "later fault, the deadline starts at the last message, and other processes "
        "share the cores.",
        f"The resources of a session in main (sockets, files, shared memory) must be "
        f"freed {LEFT_S:g} s after it is closed.",
        "",
        "| streams | rounds | runs of programs | unhurt in the end | named error | "
        "slowest error, s | slowest to leave nothing, s | cut streams | "
        "frames sent again | wrong |",
        f"|{' --- |' * 10}",
    ]
    for mode in dict.fromkeys(one["mode"] for one in rounds):
        own = [one for one in rounds if one["mode"] == mode]
        finished = sum(one["outcome"] == "finished" for one in own)
        cells = [mode, len(own), sum(one["runs"] for one in own), finished]
        cells += [len(own) - finished]
        cells += [
            f"{max(one.get(what, 0.0) for one in own):.2f}"
            for what in ("seconds", "gone_s")
        ]
        cells += [sum(one.get(what, 0) for one in own) for what in ("cuts", "resends")]
        cells += [sum(bool(one["wrong"]) for one in own)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    kinds = Counter(
        f"{fault['fault']}, {'lasting' if fault['long'] else 'passing'}"
        for one in rounds
        for fault in one["faults"]
    )
    lines += ["", "| fault | times |", "| --- | --- |"]
    lines += [f"| {kind} | {count} |" for kind, count in sorted(kinds.items())]
    lines += ["", f"Left in the end: {', '.join(results['left']) or 'nothing'}."]
    if "growth_mib" in (steps := results.get("steady", {})):
        lines += [
            "",
            f"{steps['steps']:,} steps with {steps['cuts']} cuts; MiB resident "
            "after each tenth:",
            "",
            "| process | " + " | ".join(map(str, range(1, 11))) + " | from 2 on |",
            "| --- |" + " --- |" * 11,
        ]
        for name, of in steps["resident_mib"].items():
            cells = [name, *of[:10], f"+{steps['growth_mib'][name]}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign and write its results. Returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as compiled:
        jax.config.update("jax_compilation_cache_dir", compiled)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        found = campaign(
            asked.modes,
            asked.programs,
            seconds=asked.minutes * 60,
            steps=asked.steps,
            seed=asked.seed,
            out=asked.out,
        )
    wrong = [*found["rounds"], found.get("steady", {"wrong": []})]
    return int(any(one["wrong"] for one in wrong) or bool(found["left"]))


if __name__ == "__main__":
    raise SystemExit(main())
