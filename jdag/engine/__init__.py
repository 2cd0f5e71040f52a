"""The engine: pure Python, told events, asking for effects."""

from jdag.engine.engine import Engine

__all__ = ["Engine"]
