"""Unit tests of `jdag.collectives`."""
