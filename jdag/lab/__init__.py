"""Runs as experiments: exploration of all orders of a program's events."""

from jdag.lab import strategies as strategies
