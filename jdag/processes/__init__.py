"""The real driver: workers that are processes, on one host or on many."""

import os

# What gRPC would tell of connections that end; it reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
