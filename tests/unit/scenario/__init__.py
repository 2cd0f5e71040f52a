"""Unit tests of `jdag.scenario`."""
