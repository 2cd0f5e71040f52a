"""The former place of `jdag.scenario.Case`, kept for one release."""

from jdag.scenario import Case

__all__ = ["Case"]
