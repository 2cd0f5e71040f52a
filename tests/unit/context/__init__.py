"""Unit tests of `jdag.context`."""
