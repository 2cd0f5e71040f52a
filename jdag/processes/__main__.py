"""Worker processes, `python -m jdag.processes`: see `jdag.processes.launch.worker`."""

import sys

from jdag.processes.launch.parent_watch import Watch

watch = Watch(sys.argv[1:])

# Importing JAX takes seconds, during which the parent may end.
from jdag.processes.launch.worker import main  # noqa: E402

main(watch)
