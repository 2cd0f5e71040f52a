"""Unit tests of `jdag.processes.session`."""
