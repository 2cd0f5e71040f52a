"""Unit tests of `jdag.testing`."""
