"""Unit tests of `jdag.settings`."""
