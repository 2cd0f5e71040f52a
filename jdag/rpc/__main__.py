"""`python -m jdag.rpc`: what worker processes are started by; see `jdag.rpc.worker`."""

import sys

from jdag.rpc.worker import main

main(sys.argv[1:])
