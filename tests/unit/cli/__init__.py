"""Unit tests of `jdag.cli`."""
