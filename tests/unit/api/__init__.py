"""Unit tests of `jdag.api`."""
