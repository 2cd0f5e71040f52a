"""Runs as experiments: sweeps, re-timing, and exploration of all orders of events."""

from jdag.lab import strategies as strategies
