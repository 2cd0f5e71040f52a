"""What one worker of a net has: its engine, its values, what is ready to happen."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from jdag.engine import Engine
from jdag.engine.protocol import Event, Job, Key, Spawn

Body = Generator[int, Any, Any]


@dataclass
class Place:
    """One worker: its engine, its values, its ready jobs, its programs."""

    engine: Engine
    values: dict[Key, Any] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    resumed: dict[int, Any] = field(default_factory=dict)
    alarms: dict[int, Event] = field(default_factory=dict)  # By waiter.
    spawned: list[Spawn] = field(default_factory=list)
    running: dict[int, tuple[Any, Body]] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)  # Of whom it was told.
