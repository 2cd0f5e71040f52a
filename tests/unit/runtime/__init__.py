"""Unit tests of `jdag.runtime`."""
