"""Experiments over many runs: sweeps, re-timing, exploration of event orders."""

from jdag.lab import strategies as strategies
