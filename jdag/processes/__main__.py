"""Entry point of worker processes, `python -m jdag.processes`; jdag itself starts it.

See `jdag.processes.launch.worker`.
"""

import gc
import sys

from jdag.processes.launch.parent_watch import Watch

if len(sys.argv) != 5:
    sys.exit("python -m jdag.processes is internal to jdag: use `jdag worker` instead")
watch = Watch(sys.argv[1:])

gc.disable()  # Modules make no garbage, and a collection visits all of them.
# Importing JAX takes seconds, during which the parent may end.
from jdag.processes.launch.worker import main  # noqa: E402

main(watch)
