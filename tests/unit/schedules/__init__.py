"""Unit tests of `jdag.schedules`."""
