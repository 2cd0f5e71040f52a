"""Unit tests of `jdag.report`."""
