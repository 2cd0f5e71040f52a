"""Entry point of worker processes, `python -m jdag.rpc`; see `jdag.rpc.worker`."""

import sys

from jdag.rpc.watch import Watch

watch = Watch(sys.argv[1:])

# Importing JAX takes seconds, during which the parent may end.
from jdag.rpc.worker import main  # noqa: E402

main(watch)
