"""Runs jdag on a GPU: digits, conformance tests, a transformer, equality of bits.

    python -m paper.gpu                 all parts; writes results/gpu.json and gpu.md
    python -m paper.gpu --cpu-dry-run   small parts on CPU; needs --out

If JAX finds no GPU, the script prints that and exits with 2. Several processes share
the GPU, so memory is not preallocated. Each part runs in a separate process. If a part
fails, the results contain its last output, and the exit code is 1.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paper.figures import RESULTS, machine

ROOT = Path(__file__).parents[1]
DEVICE = "gpu:0"
PROCESSES, AT_ONCE = 20, 4
PART_S = 1_800
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
KIND = "import jax; print(jax.devices('gpu')[0].device_kind)"
LINES_MAX = 15


class Failed(Exception):
    """A part has failed. The message is the end of its output."""


def said_by(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Run Python in a new process. Returns its output, or raises `Failed`."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **(env or {}),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=PART_S,
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()[-LINES_MAX:]
        raise Failed("\n".join([f"exit code {done.returncode}", *lines]))
    return done.stdout


class Parts:
    """The measurements of this script; each method runs one on the device."""

    def __init__(self, device: str, *, is_tiny: bool, processes: int) -> None:
        self._device = device
        self._tiny = ["--tiny"] if is_tiny else []
        self._processes = processes

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
            found = json.loads(said_by(run))
        keys = ("answer", "test_accuracy", "final_loss", "gradient_difference")
        return {key: found[key] for key in keys}

    def conformance(self) -> dict[str, str]:
        """Run the conformance suite with workers on this device."""
        suite = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        suite += [
            "tests/conformance/test_forward.py" if self._tiny else "tests/conformance"
        ]
        said = said_by([*suite, "-k", "socket"], {"JDAG_DEVICE": self._device})
        return {"said": said.strip().splitlines()[-1]}

    def transformer(self) -> Any:
        """Run `paper.blocks measure`, which times the gradient of a transformer."""
        return self._blocks("measure")

    def bits(self) -> dict[str, Any]:
        """Count the distinct results of new processes, without and with XLA's flag."""
        flags = {"as it comes": "", DETERMINISTIC: DETERMINISTIC}
        if self._device == "cpu":  # The flag has no effect on CPU.
            flags.pop(DETERMINISTIC)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            asked = {
                name: [
                    pool.submit(self._blocks, "bits", {"XLA_FLAGS": _with(flag)})
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

    def _blocks(self, what: str, env: Mapping[str, str] | None = None) -> Any:
        command = ["-m", "paper.blocks", what, "--device", self._device, *self._tiny]
        return json.loads(said_by(command, env).splitlines()[-1])


def _with(flag: str) -> str:
    return f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def table(found: Mapping[str, Any]) -> str:
    """Return the results as a table in Markdown."""
    rows = ["| what | measured |", "| --- | --- |"]
    for name, part in found["parts"].items():
        if "failed" in part:
            rows.append(f"| {name} | failed: {part['failed'].splitlines()[-1]} |")
    parts = {name: one for name, one in found["parts"].items() if "failed" not in one}
    if one := parts.get("digits"):
        rows.append(f"| digits, test accuracy | {one['test_accuracy']:.3f} |")
        apart = one["gradient_difference"]
        rows.append(f"| digits, gradients against the oracle | {apart:.1e} |")
    if one := parts.get("conformance"):
        rows.append(f"| conformance suite | {one['said']} |")
    if one := parts.get("transformer"):
        size = f"{one['parameters'] / 1e6:.1f}M parameters, bfloat16"
        for name, taken in one["seconds"].items():
            ratio = one["ratios"].get(name, 1.0)
            aim = f", target {one['targets'][name]}x" if name in one["targets"] else ""
            said = f"{taken * 1e3:.1f} ms, {ratio:.2f}x{aim}"
            rows.append(f"| {size}: {name} | {said} |")
        for name, apart in one["gradient_difference"].items():
            rows.append(f"| {name}: gradients against one jit | {apart:.1e} |")
        same = one["same_bits_in_one_process_and_two"]
        rows.append(f"| one process and two: same bits | {same} |")
    if one := parts.get("bits"):
        for flag, ways in one["patterns"].items():
            for way, count in ways.items():
                said = f"{count} in {one['processes']} fresh processes"
                rows.append(f"| bit patterns, {way}, XLA flags {flag} | {said} |")
    return f"{found['device']}\n\n" + "\n".join(rows) + "\n"


def main() -> int:
    """Run all parts, write their results, and return the exit code."""
    parser = argparse.ArgumentParser(description="jdag on a GPU.")
    parser.add_argument("--cpu-dry-run", action="store_true")
    parser.add_argument("--out", type=Path, help="folder  [default: paper/results]")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    asked = parser.parse_args()
    if asked.cpu_dry_run and asked.out is None:
        parser.error("--cpu-dry-run needs --out, since its numbers are not results")
    kind, device = "CPU, a dry run", "cpu"
    if not asked.cpu_dry_run:
        try:
            kind, device = said_by(["-c", KIND]).strip(), DEVICE
        except Failed:
            print("JAX finds no GPU, so nothing was measured; see --cpu-dry-run")
            return 2
    parts = Parts(device, is_tiny=asked.cpu_dry_run, processes=asked.processes)
    found: dict[str, Any] = {"device": kind, "machine": machine(), "parts": {}}
    for part in (parts.digits, parts.conformance, parts.transformer, parts.bits):
        print(f"{part.__name__} ...", flush=True)
        try:
            found["parts"][part.__name__] = part()
        except (Failed, subprocess.TimeoutExpired) as error:
            found["parts"][part.__name__] = {"failed": str(error)}
            print(error, file=sys.stderr)
    out = asked.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / "gpu.md").write_text(table(found), encoding="utf-8")
    print(table(found))
    return int(any("failed" in one for one in found["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
