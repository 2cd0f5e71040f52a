"""Which collective calls of several programs belong together, and which never end.

A group is the tuple of its members' names. The calls of one group belong together in
the order in which each member makes them, those that fail included, whenever it comes.

Inputs:  `arrive` for each call, `ended` for each program that is over.
Outputs: the calls of a complete group, and an error for each member that gets one.
Invariant: a member waits in one call at most.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jdag.errors import SHOWN_MAX, abridged

_Group = tuple[str, ...]


class CollectiveCall(NamedTuple):
    """A call by one member; `agreed` has to be equal in the calls of all."""

    where: str  # What is called, and at which line.
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
        self._ended: dict[str, str] = {}  # How each ended.
        # By member and group: errors of calls to which others came before.
        self._owed: defaultdict[tuple[str, _Group], list[str]] = defaultdict(list)

    def arrive(self, name: str, call: CollectiveCall) -> tuple[Calls, Errors]:
        """Take a member's call: return those of a complete group, and errors."""
        among = call.among
        if owed := self._owed[name, among]:
            return {}, {name: f"{owed.pop(0)}\n  {name!r} came later, in {call.where}"}
        self._waiting[name] = call
        calls = self._calls(among)
        over = [f"{one!r} {self._ended[one]}" for one in among if one in self._ended]
        if why := "; ".join(over) or _disagreement(calls):
            return {}, self._fail([among], why)
        if len(calls) == len(among):
            for one in among:
                del self._waiting[one]
            return calls, {}
        ring = [one for one in self._after(name, {}) if name in self._after(one, {})]
        groups = dict.fromkeys(self._waiting[one].among for one in ring)
        why = f"{' and '.join(map(repr, ring))} wait for each other, in groups "
        return {}, self._fail(groups, why + " and ".join(map(str, groups)))

    def ended(self, name: str, why: str) -> Errors:
        """Take the end of a program: return the errors of those that wait for it."""
        self._ended[name] = why
        groups = dict.fromkeys(call.among for call in self._waiting.values())
        return self._fail([one for one in groups if name in one], f"{name!r} {why}")

    def _calls(self, among: _Group) -> Calls:
        found = {one: self._waiting[one] for one in among if one in self._waiting}
        return {one: call for one, call in found.items() if call.among == among}

    def _after(self, name: str, found: dict[str, None]) -> dict[str, None]:
        """Find the members, waiting elsewhere, for which one waits, directly or not."""
        among = self._waiting[name].among
        for one in among:
            there = self._waiting.get(one)
            if there is not None and there.among != among and one not in found:
                found[one] = None
                self._after(one, found)
        return found

    def _fail(self, groups: Iterable[_Group], why: str) -> Errors:
        each = {among: self._calls(among) for among in groups}
        waiting = {one: call for calls in each.values() for one, call in calls.items()}
        text = failure(waiting, why)
        for among, calls in each.items():
            for one in among:
                if one in calls:
                    del self._waiting[one]
                else:
                    self._owed[one, among].append(text)
        return dict.fromkeys(waiting, text)


def failure(calls: Calls, why: str) -> str:
    """Return the error text of calls that wait, and fail."""
    waits = [f"  {one!r} waits in {call.where}" for one, call in calls.items()]
    return "\n".join([f"a collective cannot be completed: {why}", *waits])


def _disagreement(calls: Calls) -> str:
    (first, one), *others = calls.items()
    for name, other in others:
        for key in dict.fromkeys((*one.agreed, *other.agreed)):
            if (mine := one.agreed.get(key)) != (theirs := other.agreed.get(key)):
                shown = [abridged(str(value), SHOWN_MAX) for value in (mine, theirs)]
                return f"{key} is {shown[0]} in {first!r} and {shown[1]} in {name!r}"
    return ""
