"""Unit tests of `jdag.engine`."""
