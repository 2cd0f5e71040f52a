"""The suite: units by room, conformance, properties, processes; helpers are tools."""

import os
from importlib.metadata import version
from pathlib import Path

from tests.tools.tiers import TIER

ROOT = Path(__file__).parents[1]

# Compiled functions are kept for the processes of this run and for the next run. JAX
# reads these when it is imported, here and in the processes that tests start.
COMPILED = ROOT / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# The first tier compiles in a third of the time, to slower code; the other tiers
# compile as users do. XLA ends a process that names an option which it does not have.
if TIER == "first" and version("jaxlib").startswith("0.10."):
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 "
        "--xla_cpu_parallel_codegen_split_count=1",
    )
