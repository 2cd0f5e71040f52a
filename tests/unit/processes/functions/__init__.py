"""Unit tests of `jdag.processes.functions`."""
