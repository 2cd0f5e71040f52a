"""The engine: a state machine in pure Python that takes events and returns effects."""

from jdag.engine.engine import Engine

__all__ = ["Engine"]
