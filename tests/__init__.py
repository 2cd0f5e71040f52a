"""The suite; shared helpers are imported as `tests.name`."""

import os
from pathlib import Path

# Compiled functions are kept for the processes of this run and for the next run. JAX
# reads these when it is imported, here and in the processes that tests start.
COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
