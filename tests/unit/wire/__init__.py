"""Unit tests of `jdag.wire`."""
