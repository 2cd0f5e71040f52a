"""Unit tests of `jdag.training`."""
