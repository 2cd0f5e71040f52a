"""Runs jdag on a GPU: hops by part, small layers, a transformer, bits, digits, tests.

    python -m paper.gpu             all parts; writes results/gpu.json and gpu.md
    python -m paper.gpu --dry-run   small parts on CPU; needs --out

If JAX finds no GPU, the script prints that and exits with 2. Several processes share
the GPU, so memory is not preallocated. Each part runs in a separate process, and all
end within `LIMIT_S`. The results are written after each part. If a part fails or has no
time left, the results contain what it measured and its last output, and the exit code
is 1.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paper.figures import RESULTS, machine

ROOT = Path(__file__).parents[1]
DEVICE = "gpu:0"
PROCESSES, AT_ONCE = 8, 4
LIMIT_S = 450
# The most seconds of each part, most important first. All share `LIMIT_S`.
PARTS = {
    "hop": 120,
    "layers": 60,
    "transformer": 150,
    "bits": 90,
    "digits": 90,
    "conformance": LIMIT_S,
}
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
KIND = "import jax; print(jax.devices('gpu')[0].device_kind)"
LINES_MAX = 15


class Failed(Exception):
    """A part has failed. The message is the end of its output, `said` all of stdout."""

    def __init__(self, why: str, said: str) -> None:
        super().__init__(why)
        self.said = said


def said_by(
    command: Sequence[str], env: Mapping[str, str] | None = None, limit_s: float = 60
) -> str:
    """Run Python in a new process. Returns its output, or raises `Failed`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                **(env or {}),
            },
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = f"exit code {child.wait(max(limit_s, 0.1))}"
        except subprocess.TimeoutExpired:
            code = f"it took more than {limit_s:.0f} s"
            os.killpg(child.pid, signal.SIGKILL)  # With the workers of its clusters.
            child.wait()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read())
    if child.returncode:
        lines = "".join(texts).splitlines()[-LINES_MAX:]
        raise Failed("\n".join([code, *lines]), texts[0])
    return texts[0]


def last_json(said: str) -> Any:
    """Return the last complete line of JSON, or {} if there is none."""
    for line in reversed(said.splitlines()):
        try:
            return json.loads(line)
        except ValueError:
            continue
    return {}


class Parts:
    """The measurements of this script; each method runs one on the device."""

    def __init__(self, device: str, *, is_tiny: bool, processes: int) -> None:
        self._device = device
        self._tiny = ["--tiny"] if is_tiny else []
        self._processes = processes
        self.limit_s = 0.0  # Seconds that the part may still take.

    def run(self, name: str, limit_s: float) -> dict[str, Any]:
        """Run a part. If it fails, return what it measured and, as `failed`, why."""
        self.limit_s = limit_s
        part: Callable[[], dict[str, Any]] = getattr(self, name)
        try:
            if limit_s <= 0:
                raise Failed(f"no time was left of {LIMIT_S} s", "")
            return part()
        except Failed as error:
            return {**last_json(error.said), "failed": str(error)}
        except Exception as error:
            return {"failed": repr(error)}

    def digits(self) -> dict[str, Any]:
        """Run `scenarios/digits.toml` with worker processes on this device."""
        scenarios = ROOT / "scenarios"
        text = (scenarios / "digits.toml").read_text(encoding="utf-8")
        data = scenarios / "data" / "digits.npz"
        text = text.replace('"data/digits.npz"', json.dumps(str(data)))
        if self._tiny:
            text = text.replace("epochs = 12", "epochs = 1")
            text = text.replace("test_accuracy = { min = 0.96 }", "")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "digits.toml"
            file.write_text(text, encoding="utf-8")
            shutil.copy(scenarios / "digits.py", folder)
            where = ["--driver", "rpc", "--device", self._device]
            out = ["--json", "--out", str(Path(folder) / "run")]
            run = ["-m", "jdag", "run", str(file), *where, *out]
            found = json.loads(said_by(run, limit_s=self.limit_s))
        keys = ("answer", "test_accuracy", "final_loss", "gradient_difference")
        return {key: found[key] for key in keys}

    def conformance(self) -> dict[str, str]:
        """Run the conformance suite with workers on this device."""
        suite = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        suite += [
            "tests/conformance/test_forward.py" if self._tiny else "tests/conformance"
        ]
        suite += ["-k", "socket"]
        said = said_by(suite, {"JDAG_DEVICE": self._device}, self.limit_s)
        return {"said": said.strip().splitlines()[-1]}

    def hop(self) -> Any:
        """Run `paper.gpu_hop`, which times a hop between two processes by part."""
        return self._measured(["-m", "paper.gpu_hop"])

    def layers(self) -> Any:
        """Run `paper.blocks layers`, which times small layers in one process."""
        return self._measured(["-m", "paper.blocks", "layers"])

    def transformer(self) -> Any:
        """Run `paper.blocks measure`, which times the gradient of a transformer."""
        return self._measured(["-m", "paper.blocks", "measure"])

    def bits(self) -> dict[str, Any]:
        """Count the distinct results of new processes, without and with XLA's flag."""
        flags = {"as it comes": "", DETERMINISTIC: DETERMINISTIC}
        if self._device == "cpu":  # The flag has no effect on CPU.
            flags.pop(DETERMINISTIC)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            asked = {
                name: [
                    pool.submit(self._bits, {"XLA_FLAGS": _with(flag)})
                    for _ in range(self._processes)
                ]
                for name, flag in flags.items()
            }
            found = {
                name: [one.result() for one in each] for name, each in asked.items()
            }
        return {
            "processes": self._processes,
            "patterns": {
                name: {way: len({one[way] for one in each}) for way in each[0]}
                for name, each in found.items()
            },
        }

    def _bits(self, env: Mapping[str, str]) -> Any:
        return self._measured(["-m", "paper.blocks", "bits"], env)

    def _measured(
        self, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> Any:
        command = [*command, "--device", self._device, *self._tiny]
        return last_json(said_by(command, env, self.limit_s))


def _with(flag: str) -> str:
    return f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def failures(part: Mapping[str, Any]) -> list[str]:
    """Return a line for each failure of a part, or of a measurement in it."""
    failed = part.get("failed") or {}
    if isinstance(failed, str):
        return failed.splitlines()[-1:]
    lines = [f"{name}: {why}" for name, why in failed.items()]
    for row in part.get("sizes", ()):
        of = f"of {row['bytes']} bytes"
        lines += [f"{name} {of}: {why}" for name, why in row["failed"].items()]
    return lines


def table(found: Mapping[str, Any]) -> str:
    """Return the results as a table in Markdown."""
    rows = ["| what | measured |", "| --- | --- |"]
    parts = found["parts"]
    for name, part in parts.items():
        rows += [f"| {name} | failed: {why} |" for why in failures(part)]
    for row in parts.get("hop", {}).get("sizes", ()):
        for name, taken in row["seconds"].items():
            size = f"hop of {row['bytes'] / 2**20:g} MiB"
            rows.append(f"| {size}, {name} | {taken * 1e3:.2f} ms |")
    rows += _rows_of_ways(parts.get("layers", {}), "{layers} layers of width {width}")
    one = parts.get("transformer", {})
    size = f"{one.get('parameters', 0) / 1e6:.1f}M parameters, bfloat16"
    rows += _rows_of_ways(one, size)
    for name, apart in one.get("gradient_difference", {}).items():
        rows.append(f"| {name}: gradients against one jit | {apart:.1e} |")
    if "same_bits_in_one_process_and_two" in one:
        same = one["same_bits_in_one_process_and_two"]
        rows.append(f"| one process and two: same bits | {same} |")
    if "patterns" in (one := parts.get("bits", {})):
        for flag, ways in one["patterns"].items():
            for way, count in ways.items():
                said = f"{count} in {one['processes']} fresh processes"
                rows.append(f"| bit patterns, {way}, XLA flags {flag} | {said} |")
    if "answer" in (one := parts.get("digits", {})):
        rows.append(f"| digits, test accuracy | {one['test_accuracy']:.3f} |")
        apart = one["gradient_difference"]
        rows.append(f"| digits, gradients against the oracle | {apart:.1e} |")
    if "said" in (one := parts.get("conformance", {})):
        rows.append(f"| conformance suite | {one['said']} |")
    return f"{found['device']}\n\n" + "\n".join(rows) + "\n"


def _rows_of_ways(part: Mapping[str, Any], what: str) -> list[str]:
    rows = []
    for name, taken in part.get("seconds", {}).items():
        ratio = part["ratios"].get(name)
        aim = part.get("targets", {}).get(name) or part.get("target")
        said = f"{taken * 1e3:.2f} ms"
        if ratio is not None:
            said += f", {ratio:.2f}x" + (f", target {aim}x" if aim else "")
        rows.append(f"| {what.format_map(part)}: {name} | {said} |")
    return rows


def write(found: Mapping[str, Any], out: Path) -> None:
    """Write the results so far."""
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / "gpu.md").write_text(table(found), encoding="utf-8")


def main() -> int:
    """Run the parts, write their results, and return the exit code."""
    parser = argparse.ArgumentParser(description="jdag on a GPU.")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path, help="folder  [default: paper/results]")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    asked = parser.parse_args()
    if asked.dry_run and asked.out is None:
        parser.error("--dry-run needs --out, since its numbers are not results")
    end_s = time.monotonic() + LIMIT_S
    kind, device = "CPU, a dry run", "cpu"
    if not asked.dry_run:
        try:
            kind, device = said_by(["-c", KIND]).strip(), DEVICE
        except Failed:
            print("JAX finds no GPU, so nothing was measured; see --dry-run")
            return 2
    parts = Parts(device, is_tiny=asked.dry_run, processes=asked.processes)
    found: dict[str, Any] = {"device": kind, "machine": machine(), "parts": {}}
    out = asked.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    for name in asked.only:
        print(f"{name} ...", flush=True)
        limit_s = min(PARTS[name], end_s - time.monotonic())
        found["parts"][name] = part = parts.run(name, limit_s)
        for why in failures(part):
            print(part.get("failed") or why, file=sys.stderr)
        write(found, out)
    print(table(found))
    return int(any(map(failures, found["parts"].values())))


if __name__ == "__main__":
    sys.exit(main())
