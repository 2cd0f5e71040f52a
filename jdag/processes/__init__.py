"""The real driver: each worker is a process, on one host or on several."""

import os

# Suppresses gRPC's log lines about closed connections. gRPC reads it when imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
