"""Unit tests of `jdag.compute`."""
