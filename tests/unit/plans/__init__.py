"""Unit tests of `jdag.plans`."""
