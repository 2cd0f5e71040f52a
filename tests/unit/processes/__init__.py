"""Unit tests of `jdag.processes`."""
