"""Unit tests of `jdag.processes.launch`."""
