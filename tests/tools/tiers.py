"""The tiers of tests: every fact once, all, and what versions can change.

`JDAG_TIER=first` leaves out tests that are marked `second` and draws fewer programs;
`versions` does so too, in the files of `VERSIONS` alone, which `tests.tools.suite`
hands to pytest. Without the variable all is run but tests that are marked `long`.
"""

import os

TIERS = ("first", "all", "versions")
TIER = os.environ.get("JDAG_TIER", "all")
assert TIER in TIERS, f"JDAG_TIER = {TIER!r}: allowed is {', '.join(TIERS)}"
FIRST = TIER != "all"

# What another Python or JAX can change: arrays, traces and compiled functions, their
# bits and their bytes; pytrees and modules; names and bytecode of functions; greenlets,
# TLS and shared memory; what the README prints. The protocol, orders of events, figures
# and our own text are the same there.
_FILES = """
arrays buffers callables checkpoint checkpoint_file code_fingerprint compute
configuration cutting dataflow digits duals engine_in_300_lines exported
fingerprint function_decoder function_encoder functions halves handshake hessian
hooks init jaxprs leafwise machine modules optimizer oracle
pairs parallel plain plan_runs programs python_calls pytrees readme script
segments shared_memory specs stateful_modules tls transform trees types
untracked values zeros
"""
VERSIONS = (
    "tests/conformance",
    *(f"tests/test_{name}.py" for name in _FILES.split()),
)


def sized(first: int, whole: int) -> int:
    """Return how many to try: in the first tier, and in both together."""
    return first if FIRST else whole
