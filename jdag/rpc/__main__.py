"""`python -m jdag.rpc`: what worker processes are started by; see `jdag.rpc.worker`."""

import sys

from jdag.rpc.watch import Watch

watch = Watch(sys.argv[1:])

# It imports JAX, which takes seconds: the parent may end meanwhile.
from jdag.rpc.worker import main  # noqa: E402

main(watch)
