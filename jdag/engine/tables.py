"""Tables: what one worker does in each step of a plan, as lists of numbers.

A table is computed once, when a plan is prepared. Its rows are the worker's segments,
in program order. A step has one list of values; a row names its inputs and outputs by
their places in this list. A row is ready when its inputs are stored, so running a step
is counting down. On the owner, a last row returns the results: it also waits for other
rows and workers that report, as a call that nobody needs may still fail the step.

Invariants: a row runs once in a step; of several ready rows, the earliest in program
order runs first; a value is freed when the last row that uses it starts.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from heapq import heappush
from typing import Any, Protocol

from msgspec import Struct

from jdag.engine.messages import Prepare, Segment, StepFrame
from jdag.engine.names import Failure, Key, LeafId, SlotKey, Worker
from jdag.errors import ProtocolError

Sizes = tuple[int, int]  # Bytes of a value, and bytes that it keeps for a backward.
UNSIZED: Sizes = (0, 0)  # As one object: the size of a value that is not known yet.


class Hop(Struct, eq=False):
    """Values that a step sends in one frame. The driver may cache its encoding."""

    to: Worker
    places: tuple[int, ...]
    frame: StepFrame  # With number and base 0.
    encoded: Any = None


class TableRow(Struct, eq=False):
    index: int
    segment: Segment | None  # None in the row of the results.
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    hops: tuple[Hop, ...] = ()
    sent: tuple[int, ...] = ()  # The indices of the outputs that hops send.
    runs: bool = False  # Otherwise the row forwards values, or returns the results.
    frees: tuple[int, ...] = ()  # Inputs that no other row uses.
    shared: tuple[int, ...] = ()  # Other inputs, without constants and leaves.
    unused: tuple[int, ...] = ()  # Outputs that no row here uses.
    gain: Any = None  # `Sizes` of its outputs less those of `frees`, once known.


class StepState(Struct, eq=False):
    """One step in progress on one worker."""

    table: "Table"
    number: int
    left: list[int]  # By row, the number of its missing inputs.
    uses: list[int]  # By place, the number of rows that will use the value.
    values: list[Any]
    ready: list[int]  # A heap of rows.
    undone: int  # Number of rows that have not run, without the row of the results.
    begun: bool
    versions: dict[LeafId, Any] = {}  # The versions that the step reads.
    reported: dict[Worker, None] = {}

    def store(self, places: Sequence[int], values: Sequence[Any]) -> None:
        stored, left, readers = self.values, self.left, self.table.readers
        for place, value in zip(places, values, strict=True):
            if stored[place] is not None:
                slot = self.table.slots[place]
                raise ProtocolError(f"slot {slot} of step {self.number} came twice")
            stored[place] = value
            for row in readers[place]:
                left[row] -= 1
                if not left[row]:
                    heappush(self.ready, row)

    def count_down(self) -> None:
        """Count a row that has run, or a report, for the row of the results."""
        left = self.left
        left[-1] -= 1
        if not left[-1]:
            heappush(self.ready, len(left) - 1)

    def use(self, row: TableRow) -> tuple[int, ...]:
        """Count the uses of a row that starts. Return the places that it frees."""
        uses, freed = self.uses, row.frees
        for place in row.shared:
            uses[place] -= 1
            if not uses[place]:
                freed = *freed, place
        return freed

    def keys(self, places: Iterable[int]) -> tuple[Key, ...]:
        context, slots = self.table.prepare.context, self.table.slots
        return tuple([SlotKey(context, self.number, slots[place]) for place in places])


class Table(Struct, eq=False):
    prepare: Prepare
    owner: Worker
    is_owner: bool
    rows: list[TableRow]
    slots: list[int]  # By place.
    places: dict[int, int]  # By slot.
    readers: list[tuple[int, ...]]  # By place, the rows that need the value.
    left: list[int]
    uses: list[int]
    values: list[Any]  # The constants; None at all other places.
    ready: list[int]  # Rows that need no input but constants.
    sizes: list[Sizes]  # By place; UNSIZED until the first step that has it.
    kept: frozenset[int]  # Places of constants and leaves, which no step owns.
    passed_on: tuple[LeafId, ...]  # Leaves that rows send or return as they are.
    reporters: Sequence[Worker]  # On the owner, the workers that report each step.
    waits: bool  # Whether a step begins only with the owner's frame.
    actions: tuple[Any, ...]  # The worker's actions in a schedule.
    report: Hop
    # By the slots of a frame that has come, their places and total size.
    arrivals: dict[tuple[int, ...], tuple[tuple[int, ...], Sizes]] = {}
    steps: dict[int, StepState] = {}  # Steps in progress, by number.
    last_over: int = 0  # The number of the last finished or dropped step.

    def step(self, number: int) -> StepState:
        step = self.steps[number] = StepState(
            self,
            number,
            self.left.copy(),
            self.uses.copy(),
            self.values.copy(),
            self.ready.copy(),
            len(self.prepare.segments),
            not self.waits,
        )
        return step

    def size(self, places: Sequence[int], freed: Sequence[int] = ()) -> Sizes:
        """Return the sizes of the values at `places`, less those at `freed`."""
        size = self.sizes
        nbytes = sum([size[p][0] for p in places]) - sum([size[p][0] for p in freed])
        kept = sum([size[p][1] for p in places]) - sum([size[p][1] for p in freed])
        return nbytes, kept


def begins_with_owner(prepare: Prepare) -> bool:
    """Whether a step begins here with the owner's frame, not with its first frame."""
    constants, segments = prepare.constants, prepare.segments
    can_start = [all([n in constants for n in each.needs]) for each in segments]
    has_tag = any([segment.tag for segment in segments])
    return bool(prepare.reads or prepare.stages or has_tag or True in can_start)


def table_of(
    prepare: Prepare,
    owner: Worker,
    constants: Mapping[int, Any],
    results: tuple[int, ...] | None = None,
    reporters: Sequence[Worker] = (),
) -> Table:
    """Return the table of a worker's part of a plan. `constants` are values by slot.

    Only the owner has `results`, the slots that a step returns, and `reporters`.
    """
    segments, context = prepare.segments, prepare.context
    read = [each.slot for each in prepare.reads]
    staged = [each.slot for each in prepare.stages]
    used = [slot for each in segments for slot in (*each.needs, *each.makes)]
    slots = dict.fromkeys([*constants, *read, *(results or ()), *staged, *used])
    places = {slot: place for place, slot in enumerate(slots)}

    def at(some: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(places.__getitem__, some))

    def hop(to: Worker, sent: tuple[int, ...]) -> Hop:
        return Hop(to, at(sent), StepFrame(context, 0, sent, 0, False))

    sent = [{slot for out in each.hops for slot in out.slots} for each in segments]
    rows = [
        TableRow(
            index,
            segment,
            at(segment.needs),
            at(segment.makes),
            tuple([hop(out.to, out.slots) for out in segment.hops]),
            tuple([n for n, slot in enumerate(segment.makes) if slot in sent[index]]),
            bool(segment.makes or not segment.hops),
        )
        for index, segment in enumerate(segments)
    ]
    left = [len(row.inputs) for row in rows]
    if results is not None:
        rows.append(TableRow(len(rows), None, at(results)))
        left.append(len(results) + len(segments) + len(reporters))
    kept = frozenset(at([*constants, *read]))
    uses, readers = _uses(rows, prepare.updates, len(places), at(staged), kept)
    passed = {place for row in rows if not row.runs for place in row.inputs}
    values: list[Any] = [None] * len(places)
    for slot, value in constants.items():
        values[places[slot]] = value
        for index in readers[places[slot]]:
            left[index] -= 1
    return Table(
        prepare,
        owner,
        results is not None,
        rows,
        [*slots],
        places,
        readers,
        left,
        uses,
        values,
        [index for index, count in enumerate(left) if not count],
        [UNSIZED] * len(places),
        kept,
        tuple([each.leaf for each in prepare.reads if places[each.slot] in passed]),
        reporters,
        begins_with_owner(prepare),
        tuple([(each.action, each.tag) for each in segments if each.tag]),
        hop(owner, ()),
    )


def _uses(
    rows: Sequence[TableRow],
    updates: Sequence[int],
    count: int,
    staged: Sequence[int],
    kept: Container[int],
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return uses and readers of each place. Set what each row frees.

    A commit may run updates again, so they use their inputs twice.
    """
    readers: list[list[int]] = [[] for _ in range(count)]
    uses = [0] * count
    for place in staged:
        uses[place] += 1
    for row in rows:
        for place in row.inputs:
            uses[place] += 1 + (row.index in updates)
            readers[place].append(row.index)
    for row in rows:
        owned = [place for place in row.inputs if place not in kept]
        row.frees = tuple([place for place in owned if uses[place] == 1])
        row.shared = tuple([place for place in owned if uses[place] > 1])
        row.unused = tuple([place for place in row.outputs if not uses[place]])
    return uses, [tuple(each) for each in readers]


class StepDriver(Protocol):
    """How steps use the values of a worker. Values are opaque to the engine."""

    has_keys: bool  # Whether a trace knows the values of a step by keys.

    def get(self, key: Key) -> Any: ...

    def put(self, key: Key, value: Any) -> None: ...

    def nbytes(self, value: Any) -> int: ...

    def refusal(self, step: StepState) -> Failure | None:
        """Return why a leaf cannot be passed on, if so."""

    def sizes(self, function: Any, is_leaf: Sequence[bool]) -> Sequence[Sizes]:
        """Return the sizes of a segment's outputs. `is_leaf` is a mask of inputs."""

    def account(self, nbytes: int, activation: int) -> None:
        """Count values that a step stores or, if negative, frees."""

    def run(self, step: StepState, row: TableRow, inputs: list[Any]) -> Any:
        """Return a tuple of a row's outputs, or a Failure. False: it must be a job."""

    def send(self, hop: Hop, number: int, base: int, values: Sequence[Any]) -> bool:
        """Send a frame now. False: sending must be an effect."""

    def flush(self) -> object:
        """Send the frames of a row, before all that follows."""

    def finish(self, waiter: int, results: tuple[Any, ...]) -> bool:
        """Resume the program of a step. False: resuming must be an effect."""
