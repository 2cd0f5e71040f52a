"""The tiers of tests: every fact once, all, and what versions can change.

`JDAG_TIER=first` leaves out tests that are marked `second` and draws fewer programs;
`versions` does so too, in the files of `VERSIONS` alone, which `tests.tools.suite`
hands to pytest. Without the variable all is run but tests that are marked `long`.
"""

import os

TIERS = ("first", "all", "versions")
TIER = os.environ.get("JDAG_TIER", "all")
assert TIER in TIERS, f"JDAG_TIER = {TIER!r}: expected {', '.join(TIERS)}"
FIRST = TIER != "all"

# What another Python or JAX can change: arrays, traces and compiled functions, their
# bits and their bytes; pytrees and modules; names and bytecode of functions; greenlets,
# TLS and shared memory; what the documents print. The protocol, orders of events,
# figures and our own text are the same there.
_FILES = {
    "docs": "blocks",
    "properties": "compute modules plan_runs stateful_modules types untracked zeros",
    "unit": "init parallel",
    "unit/api": "hvp oracle value_and_grad",
    "unit/collectives": "oracle_replicas",
    "unit/compute": "buffers callables configuration cutting dataflow duals exported "
    "fingerprint halves hooks jaxprs machine pairs pytrees segments values",
    "unit/context": "program_runner python_calls",
    "unit/engine": "functions",
    "unit/processes/functions": "code_fingerprint decoder encoder script",
    "unit/processes/net": "handshake shared_memory tls",
    "unit/scenarios": "digits engine_in_300_lines",
    "unit/training": "checkpoint checkpoint_file leafwise optimizer",
    "unit/wire": "arrays specs trees",
}
VERSIONS = (
    "tests/conformance",
    *(
        f"tests/{folder}/test_{name}.py"
        for folder, names in _FILES.items()
        for name in names.split()
    ),
)


def sized(first: int, whole: int) -> int:
    return first if FIRST else whole
