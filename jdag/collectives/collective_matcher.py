"""Matches the collective calls of several programs, and detects unmatchable ones.

A group is the tuple of its members' names. The n-th calls of all members of a group
match, counting calls that failed.

Inputs:  `arrive` for each call, `ended` for each program that has ended.
Outputs: the calls of a complete group; an error for each member that cannot continue.
Invariant: a member waits in one call at most.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jdag.errors import SHOWN_MAX, abridged

_Group = tuple[str, ...]


class CollectiveCall(NamedTuple):
    """A call by one member. `agreed` must be equal in the calls of all members."""

    where: str  # The function and its call site.
    among: _Group
    agreed: Mapping[str, object]
    given: Any = None


Calls = dict[str, CollectiveCall]
Errors = dict[str, str]


class CollectiveMatcher:
    """The collective calls of the programs on these workers."""

    def __init__(self, members: Sequence[str]) -> None:
        self.members = tuple(members)
        self._waiting: Calls = {}
        self._ended: dict[str, str] = {}  # Why each program ended.
        # By member and group: errors of calls that failed before this member's call.
        self._owed: defaultdict[tuple[str, _Group], list[str]] = defaultdict(list)

    def arrive(self, name: str, call: CollectiveCall) -> tuple[Calls, Errors]:
        """Add a call. Return its group's calls if all have arrived, and errors."""
        among = call.among
        if owed := self._owed[name, among]:
            return {}, {name: f"{owed.pop(0)}\n  {name!r} called later: {call.where}"}
        self._waiting[name] = call
        calls = self._calls(among)
        ended = [
            f"{name!r} {self._ended[name]}" for name in among if name in self._ended
        ]
        if why := "; ".join(ended) or _disagreement(calls):
            return {}, self._fail([among], why)
        if len(calls) == len(among):
            for member in among:
                del self._waiting[member]
            return calls, {}
        cycle = [m for m in self._awaited(name, {}) if name in self._awaited(m, {})]
        groups = dict.fromkeys(self._waiting[member].among for member in cycle)
        why = f"{' and '.join(map(repr, cycle))} wait for each other, in groups "
        return {}, self._fail(groups, why + " and ".join(map(str, groups)))

    def ended(self, name: str, why: str) -> Errors:
        """Add the end of a program; return the errors of members that wait for it."""
        self._ended[name] = why
        groups = dict.fromkeys(call.among for call in self._waiting.values())
        return self._fail(
            [group for group in groups if name in group], f"{name!r} {why}"
        )

    def _calls(self, among: _Group) -> Calls:
        waiting = {name: self._waiting[name] for name in among if name in self._waiting}
        return {name: call for name, call in waiting.items() if call.among == among}

    def _awaited(self, name: str, awaited: dict[str, None]) -> dict[str, None]:
        """Add to `awaited` the members for which `name` waits, even indirectly."""
        among = self._waiting[name].among
        for member in among:
            call = self._waiting.get(member)
            if call is not None and call.among != among and member not in awaited:
                awaited[member] = None
                self._awaited(member, awaited)
        return awaited

    def _fail(self, groups: Iterable[_Group], why: str) -> Errors:
        by_group = {among: self._calls(among) for among in groups}
        failed = {
            name: call for calls in by_group.values() for name, call in calls.items()
        }
        text = failure(failed, why)
        for among, calls in by_group.items():
            for name in among:
                if name in calls:
                    del self._waiting[name]
                else:
                    self._owed[name, among].append(text)
        return dict.fromkeys(failed, text)


def failure(calls: Calls, why: str) -> str:
    waits = [f"  {name!r} waits in {call.where}" for name, call in calls.items()]
    return "\n".join([f"a collective cannot be completed: {why}", *waits])


def _disagreement(calls: Calls) -> str:
    (first, expected), *rest = calls.items()
    for name, call in rest:
        for key in dict.fromkeys((*expected.agreed, *call.agreed)):
            values = expected.agreed.get(key), call.agreed.get(key)
            if values[0] != values[1]:
                shown = [abridged(str(value), SHOWN_MAX) for value in values]
                return f"{key} is {shown[0]} in {first!r} and {shown[1]} in {name!r}"
    return ""
