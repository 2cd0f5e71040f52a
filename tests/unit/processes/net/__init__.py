"""Unit tests of `jdag.processes.net`."""
