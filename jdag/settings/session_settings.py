"""Settings of a run that all drivers share, with the type of a list of workers."""

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
    listed = tuple(names) if is_listed(names) else ()  # type: ignore[arg-type]
    is_count = 1 <= len(listed) <= WORKERS_MAX
    is_usable = is_count and all(map(is_name, listed)) and are_different(listed)
    return listed if is_usable else None


_WORKERS = f"a list of 1 to {WORKERS_MAX:,} different names; each name has {NAMES}"
WORKERS = Annotated[Sequence[str], reads(_workers, _WORKERS)]
_SCHEDULE = Meta(description="a jdag.schedules.Schedule, or None")


class _Workers(Settings, frozen=True):
    """A base class, so that `workers` may be a positional argument."""

    workers: WORKERS


class RunSettings(_Workers, frozen=True, kw_only=True):
    """Settings of programs on all drivers. `jdag.launch` documents them."""

    nesting_max: NESTING = NESTING_MAX
    recover: bool = False
    schedule: Annotated[Schedule | None, _SCHEDULE] = None

    def contradictions(self) -> Iterator[str]:
        check_for(self.schedule, self.workers)
        return iter(())
