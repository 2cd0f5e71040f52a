"""Unit tests of `jdag.sim`."""
