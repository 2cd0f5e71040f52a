"""Unit tests of `jdag.lab`."""
