"""Without eight devices there is nothing here to run."""

import os

collect_ignore_glob = (
    [] if os.environ.get("JAX_NUM_CPU_DEVICES") == "8" else ["test_*.py"]
)
