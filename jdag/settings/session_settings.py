"""What a cluster is configured by, on every driver: declared once, handed on whole.

An option of `jdag.launch` that workers need is a field of `SessionSettings`: the struct
goes to each node as it is, so only what reads the field has to know of it.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta

from jdag.engine.protocol import NAMES, WORKERS_MAX, is_name
from jdag.schedules import Schedule
from jdag.schedules.schedule import check_for
from jdag.settings.validation import (
    NESTING,
    NESTING_MAX,
    Settings,
    are_different,
    is_listed,
    reads,
)


def _workers(names: object) -> tuple[str, ...] | None:
    """Return names of workers, one or more and none twice; None: they are not."""
    listed = tuple(names) if is_listed(names) else ()  # type: ignore[arg-type]
    is_count = 1 <= len(listed) <= WORKERS_MAX
    is_usable = is_count and all(map(is_name, listed)) and are_different(listed)
    return listed if is_usable else None


_WORKERS = (
    f"a list of one name or more, none twice, at most {WORKERS_MAX:,}; each of {NAMES}"
)
WORKERS = Annotated[Sequence[str], reads(_workers, _WORKERS)]
_SCHEDULE = Meta(description="a jdag.schedules.Schedule, or None")


class _Named(Settings, frozen=True):
    """Of workers: their names, the first of which may be given without its key."""

    workers: WORKERS


class RunSettings(_Named, frozen=True, kw_only=True):
    """What programs run by, whatever the driver; `jdag.launch` describes it."""

    nesting_max: NESTING = NESTING_MAX
    recover: bool = False
    schedule: Annotated[Schedule | None, _SCHEDULE] = None

    def contradictions(self) -> Iterator[str]:
        """A schedule of other workers is a ScheduleError."""
        check_for(self.schedule, self.workers)
        return iter(())
