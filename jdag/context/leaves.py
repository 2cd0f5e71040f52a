"""Leaves: how programs make, replace and drop them on their owners.

Assignments, and the leaves that they make, are numbered as calls are, by each worker
whose programs ask for them. What one asks for goes out at once, by one message to each
owner; owners work in parallel, and number the versions (`jdag.engine.leaves`).
Invariants: a number is used once; of an assignment that is refused nothing is made, and
nothing that it stored is left. A kept leaf goes once its last ref has.
"""

import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdag.compute.avals import Aval, aval_of, frozen
from jdag.compute.callables import called
from jdag.compute.duals import is_array
from jdag.compute.pairs import Pair
from jdag.compute.placed import Placed, placed
from jdag.compute.pytrees import (
    NO_LEAF,
    NUMBERS,
    flatten,
    flatten_refs,
    indices_of_arrays,
    is_constant,
    paths,
    split,
    unflatten,
)
from jdag.compute.refs import is_ref
from jdag.context.cluster_state import ClusterState
from jdag.context.refs import Hold, Leaf, Ref
from jdag.engine.functions import call_site, name_of, transferred
from jdag.engine.protocol import (
    Assigned,
    Assignment,
    ConstantKey,
    Dropped,
    Key,
    LeafId,
    Unplanned,
    Worker,
    named,
)
from jdag.errors import ContextError, JdagError
from jdag.runtime.failures import traced
from jdag.runtime.worker_runtime import ProgramPort


class Change(NamedTuple):
    """Leaves of one worker replaced by what one call of `fn` returns there.

    The outputs, in JAX's order, are the new values, with the leaves' shapes and dtypes.
    Refs among the arguments are on that worker. `purpose` is added to the call site in
    what is said of a failure. `pair` is what runs in place of `fn`, traced before.
    """

    fn: Callable[..., Any]
    refs: Sequence[Ref]
    args: tuple[Any, ...]
    purpose: str = ""
    pair: Pair | None = None


class _Call(NamedTuple):
    """A traced call; by argument its key, and its device (None: the default one)."""

    pair: Pair
    keys: list[Key]
    sources: list[str | None]
    site: str


@dataclass(slots=True)
class _Draft:
    """An assignment under construction; `leaves` are all that it gives a value."""

    path: tuple[int, ...]
    parts: list[Assignment] = field(default_factory=list)
    stored: list[tuple[Key, Any]] = field(default_factory=list)
    constants: dict[int, tuple[Key, Any]] = field(default_factory=dict)  # By id.
    leaves: dict[Leaf, None] = field(default_factory=dict)
    given: dict[Leaf, Any] = field(default_factory=dict)  # Values of the caller.


class Assignments:
    """Makes, replaces and drops leaves for one program."""

    # Of the main program, if it was asked for: it copies what is assigned.
    recovery: Any = None

    def __init__(self, state: ClusterState, port: ProgramPort) -> None:
        self.state = state
        self._port = port
        self._numbers = state.numbers(port.worker)
        self._loose: deque[tuple[Key, Worker]] = deque()  # Kept, and no ref is left.
        self.unplanned: deque[tuple[Any, Worker]] = deque()  # Plans without a name.

    def put(self, place: str, tree: Any, tracked: bool = True) -> Any:
        """Make leaves from values; see `Cluster.put`."""
        values, treedef = flatten(tree, what="the tree for cluster.put")
        places = indices_of_arrays("cluster.put", tree, values)
        # A tree of constants alone is a mistake; the error names its first leaf.
        places = places or list(range(len(values)))
        arrays = [self._array(values[number], tree, number) for number in places]
        refs = self.write([place] * len(arrays), arrays, [tracked] * len(arrays))
        for number, ref in zip(places, refs, strict=True):
            values[number] = ref
        return unflatten(treedef, values)

    def write(
        self,
        places: Sequence[Ref | str],
        values: Sequence[Any],
        tracked: Sequence[bool],
    ) -> list[Ref]:
        """Put values into leaves, all of them or none; return refs to these.

        Args:
            places: for each value a leaf, whose next version it is to be, or the name
                of a worker, or of a device of one, where it is to be a new leaf.
            values: arrays of strong type, of the shapes and dtypes of the leaves.
            tracked: for each, whether a new leaf may have gradients.

        Raises:
            JdagError: a ref is no leaf, or is there twice.
            WorkerLost: an owner is gone.
        """
        draft = self._draft()
        kept: list[Leaf] = []
        groups: dict[tuple[str, str | None, bool], list[tuple[Leaf, Any]]] = {}
        for place, value, tracks in zip(places, values, tracked, strict=True):
            if isinstance(place, str):
                worker, device = self.state.place(place, "cluster.put")
                leaf = self._new(worker, aval_of(value).strong.on(device), tracks)
            else:
                leaf = self.leaf(place)
            kept.append(leaf)
            draft.given[leaf] = value
            of = (leaf.id.worker, leaf.aval.device, isinstance(place, str))
            groups.setdefault(of, []).append((leaf, value))
        for (worker, device, is_new), group in groups.items():
            leaves = [leaf for leaf, _ in group]
            keys = [leaf.first if is_new else leaf.key for leaf in leaves]
            call = None
            if is_new and device is None:
                draft.stored += zip(keys, [value for _, value in group], strict=True)
            else:
                # The worker puts them on the device, under version numbers of its own.
                args = [v.struct() if isinstance(v, Aval) else v for _, v in group]
                call = self._traced(draft, worker, Change(transferred, (), tuple(args)))
            add_part(draft, keys, leaves, call)
        self._tell(draft)
        return [self.state.leaf_ref(leaf) for leaf in kept]

    def _array(self, value: Any, tree: Any, place: int) -> Any:
        """Return a value as an array of strong type, in abstract mode its aval."""
        try:
            if type(value) in NUMBERS and value is not tree:
                raise JdagError(NO_LEAF.format(value))
            if is_ref(value):
                raise JdagError(
                    f"a ref ({value!r}) is already on a worker; ctx.move moves it"
                )
            if isinstance(value, jax.core.Tracer):
                raise ContextError("a tracer is no array: jdag runs outside of jit")
            if isinstance(value, jax.ShapeDtypeStruct) and not self.state.abstract:
                raise JdagError(
                    "a ShapeDtypeStruct stands for an array only where "
                    "values='abstract'"
                )
            value = frozen(value)
            aval = aval_of(value).strong
        except JdagError as error:
            path = paths(tree)[place]
            where = f"cluster.put, at {path}" if path else "cluster.put"
            raise type(error)(f"{where}: {error}") from None
        return aval if self.state.abstract else stored(value)

    def make(
        self,
        worker: str,
        device: str | None,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make leaves by a function on their owner; see `Cluster.make`."""
        draft = self._draft()
        call = self._traced(draft, worker, Change(fn, (), args), kwargs)
        leaves = [self._new(worker, aval.on(device)) for aval in call.pair.out_avals]
        if leaves:
            add_part(draft, [leaf.first for leaf in leaves], leaves, call)
        self._tell(draft)
        refs = [self.state.leaf_ref(leaf) for leaf in leaves]
        return unflatten(call.pair.out_tree, refs)

    def copy(self, tree: Any, tracked: bool) -> Any:
        """Make leaves of what leaves hold now; see `Cluster.copy`."""
        refs, form = flatten_refs(tree, is_ref)
        leaves = {ref: self.leaf(ref) for ref in refs}
        copies = {
            ref: self._new(ref.owner, ref.aval, tracked and not leaf.id.untracked)
            for ref, leaf in leaves.items()
        }
        self._transfer(copies)
        return unflatten(form, [self.state.leaf_ref(copies[ref]) for ref in refs])

    def keep(self, tree: Any, *, apart: bool = False) -> Any:
        """Make untracked leaves of values where they are; see `Cluster.keep`.

        `apart`: one that has failed makes no other fail.
        """
        refs, form = flatten_refs(tree, is_ref)
        kept: dict[Ref, Leaf] = {}
        for ref in dict.fromkeys(refs):
            self.admit(ref, "cluster.keep")
            kept[ref] = self._new(ref.owner, ref.aval, tracked=False)
        self._transfer(kept, apart)
        holds = [Hold(self._loose, leaf.key, leaf.id.worker) for leaf in kept.values()]
        for leaf, hold in zip(kept.values(), holds, strict=True):
            leaf.held = weakref.ref(hold)
        return unflatten(form, [self.state.leaf_ref(kept[ref]) for ref in refs])

    def _transfer(self, made: Mapping[Ref, Leaf], apart: bool = False) -> None:
        """Send the assignment that makes leaves of what refs name, where it is."""
        groups: dict[tuple[str, Ref | None], list[Ref]] = {}
        for ref in made:
            groups.setdefault((ref.place, ref if apart else None), []).append(ref)
        draft = self._draft()
        for group in groups.values():
            change = Change(transferred, (), tuple(group))
            call = self._traced(draft, group[0].owner, change)
            leaves = [made[ref] for ref in group]
            add_part(draft, [leaf.first for leaf in leaves], leaves, call)
        self._tell(draft)

    def restore(self, sources: Mapping[Leaf, Any], absent: Container[Leaf]) -> None:
        """Give leaves the values of refs on their workers, or of arrays.

        `absent`: those that are not on their workers, where they are made anew.
        """
        draft = self._draft()
        for leaf, source in sources.items():  # Apart, so that one that failed is alone.
            given = source.struct() if isinstance(source, Aval) else source
            change = Change(transferred, (), (given,))
            call = self._traced(draft, leaf.id.worker, change)
            add_part(draft, [leaf.first if leaf in absent else leaf.key], [leaf], call)
        self._tell(draft)

    def assign(self, changes: Sequence[Change]) -> None:
        """Make all changes, or none if it raises; see `Cluster.update`."""
        self._tell(self._drafted(changes))

    def planned(self, changes: Sequence[Change]) -> Sequence[Assignment]:
        """Return what `assign` would send; nothing is sent, and no number used."""
        return self._drafted(changes).parts

    def _drafted(self, changes: Sequence[Change]) -> _Draft:
        draft = self._draft()
        for change in changes:
            leaves = [self.leaf(ref) for ref in change.refs]
            call = self._traced(draft, leaves[0].id.worker, change)
            _check_outputs(call.pair, leaves)
            add_part(draft, [leaf.key for leaf in leaves], leaves, call)
        return draft

    def pair_of(self, change: Change) -> Pair:
        """Return what a change would run; nothing is replaced."""
        owner = self.leaf(change.refs[0]).id.worker
        return self._traced(self._draft(), owner, change).pair

    def drop(self, refs: Any) -> None:
        """Drop leaves; see `Cluster.drop`."""
        leaves = [self.leaf(ref) for ref in flatten_refs(refs, is_ref)[0]]
        self._port.tell(Dropped(tuple(leaf.id for leaf in leaves)))
        for leaf in leaves:
            leaf.dropped = True
            self.state.leaves.pop(leaf.id, None)
        if self.recovery is not None:
            self.recovery.dropped(leaves)

    def forget(self) -> None:
        """Drop what was kept, and plans, that no program names any more."""
        while self.unplanned and not self.state.closed:
            self._port.tell(Unplanned(self.unplanned.popleft()[0]))
        if not self._loose:
            return
        there = {} if self.state.closed else self.state.leaves
        names = [self._loose.popleft()[0].name for _ in range(len(self._loose))]
        if gone := [there[name] for name in sorted(names) if name in there]:
            self.drop(list(map(self.state.leaf_ref, gone)))

    def admit(self, ref: Ref, what: str = "a fetch") -> None:
        """Raise ContextError unless the ref is of this cluster and can be read."""
        self.state.check_own(ref)
        if ref.leaf is None:
            ref.holder.check(what, ref)

    def leaf(self, ref: Ref) -> Leaf:
        """Return the record of a leaf; raise JdagError if the ref is not a leaf."""
        self.admit(ref)
        if ref.leaf is None:
            raise JdagError(
                f"{ref!r} is no leaf; leaves are what cluster.put and cluster.make give"
            )
        return ref.leaf

    def _new(self, worker: str, aval: Aval, tracked: bool = True) -> Leaf:
        numbers = self._numbers
        counter = (not tracked) << 31 | numbers.leaves
        id = LeafId.made_by(numbers.index, numbers.incarnation, counter, worker)
        numbers.leaves += 1
        return Leaf(id, aval)

    def _draft(self) -> _Draft:
        numbers = self._numbers
        maker = numbers.incarnation << 16 | numbers.index  # 32 bits.
        return _Draft((maker, numbers.assignments + 1))

    def _traced(
        self, draft: _Draft, worker: str, change: Change, kwargs: Any = None
    ) -> _Call:
        """Return the call of a change; add its constants, each object once."""
        fn, args, own = called(change.fn, change.args)
        parts = split(args, kwargs or {}, self.state.is_named, own)
        keys: list[Any] = [None] * parts.size
        avals: list[Any] = [None] * parts.size
        sources: list[str | None] = [None] * parts.size
        for position, value in (*parts.refs, *parts.constants):
            if is_ref(value):
                self._check_owner(worker, change.fn, value)
                avals[position] = value.aval.on(None)
                sources[position] = value.device
                keys[position] = value.key
            else:
                avals[position] = parts.aval(position, value)
                key = ConstantKey(None, (*draft.path, len(draft.parts)), position)
                known = draft.constants.setdefault(id(value), (key, value))
                keys[position] = known[0]
        site = f"{call_site()}{change.purpose and f', {change.purpose}'}"
        untracked = (False,) * parts.size
        made = change.pair
        made = made or traced(fn, parts, tuple(avals), untracked, worker, site)
        return _Call(made, keys, sources, site)

    def _check_owner(self, worker: str, fn: Callable[..., Any], ref: Ref) -> None:
        self.admit(ref)
        hold = ref.hold if ref.leaf is None else None
        if hold is not None and ref.holder.port.worker != self._port.worker:
            hold.keep()  # Drops by two workers would arrive in any order.
        if ref.owner != worker:
            raise JdagError(
                f"{name_of(fn)} makes leaves on {worker!r}, and an argument, {ref!r}, "
                f"lives on {ref.owner!r}; leaves are computed where they are kept: "
                f"ctx.move({named(worker)!r}, ref) first"
            )

    def _tell(self, draft: _Draft) -> None:
        """Send an assignment to the engine; its number is used even if that raises."""
        if not draft.parts:
            return
        self._numbers.assignments += 1
        stored = (*draft.stored, *draft.constants.values())
        values = [(key, self.state.value(value)) for key, value in stored]
        self._port.tell(Assigned(draft.path, tuple(draft.parts)), values)
        self.state.leaves.update({leaf.id: leaf for leaf in draft.leaves})
        if self.recovery is not None:
            self.recovery.assigned(draft.leaves, draft.given)


class Copying:
    """The part of a `Cluster` that makes leaves of what refs name, where it is."""

    _check: Callable[[str], None]
    _assignments: Assignments

    def copy(self, refs: Any, *, tracked: bool = True) -> Any:
        """Copy leaves where they are, such as for a target network or an average.

        An average is then kept by `update`, as in

            average = cluster.copy(params, tracked=False)
            cluster.update(lambda old, new: 0.99 * old + 0.01 * new, average, params)

        Args:
            refs: a pytree of leaves; of one that is there twice there is one copy.
            tracked: False for copies without gradients; else those of tracked leaves
                have them.

        Returns:
            The same pytree of refs to new leaves, which hold the newest versions.

        Raises:
            JdagError, WorkerLost: something is no leaf, or its worker is gone.
        """
        self._check("cluster.copy")
        return self._assignments.copy(refs, tracked)

    def keep(self, refs: Any) -> Any:
        """Carry values of an open context over to later ones, without fetching them.

        Each stays where it is, as an untracked leaf, until its last ref is gone, or
        `drop`; what a program of `run` returns, until `drop`.

        Args:
            refs: a pytree of refs, such as the hidden state of a recurrent network.

        Returns:
            The same pytree of untracked refs, which any context may use.

        Raises:
            ContextError: the context of a ref is not open, or of another program.
            JdagError, WorkerLost: a leaf of the pytree is no ref, or its worker gone.
        """
        self._check("cluster.keep")
        return self._assignments.keep(refs)


def add_part(
    draft: _Draft, outputs: Sequence[Key], leaves: Sequence[Leaf], call: _Call | None
) -> None:
    """Add a part to an assignment; without a call its values are stored."""
    for leaf in leaves:
        if leaf in draft.leaves:
            raise JdagError(
                f"{leaf} is there twice; one assignment gives a leaf one new value"
            )
        draft.leaves[leaf] = None
    arguments: Sequence[Key] = ()
    made: Pair | Placed | None = None
    if call is not None:
        arguments, targets = call.keys, [leaf.aval.device for leaf in leaves]
        made = placed(call.pair, targets[0], call.sources, targets)
    part = Assignment(
        (*draft.path, len(draft.parts)),
        made,
        tuple(arguments),
        tuple(outputs),
        tuple(leaf.aval for leaf in leaves),
        str(call_site()) if call is None else call.site,
    )
    draft.parts.append(part)


def column(arg: Any, number: int, treedef: Any) -> Sequence[Any]:
    """Return an argument of `Cluster.update` for each leaf, or the one for all."""
    leaves, found = flatten(arg)
    if not any(map(is_ref, leaves)):
        return [arg] * treedef.num_leaves
    if all(is_ref(leaf) or is_constant(leaf) for leaf in leaves):
        leaves, found = flatten_refs(arg, is_ref)
    if treedef != found:  # In this order: a treedef calls itself equal to a Form.
        raise JdagError(
            f"argument {number} of cluster.update has refs in it, so it has to "
            f"have the structure of the leaves, {treedef}; it is {found}"
        )
    return leaves


def stored(value: Any) -> Any:
    """A frozen array as leaves keep it: of strong type, no wider than JAX's are now."""
    known = aval_of(value)
    dtype: Any = jax.dtypes.canonicalize_dtype(known.dtype, allow_extended_dtype=True)
    is_so = is_array(value) and not known.weak and value.dtype == dtype
    return value if is_so else jnp.asarray(value, dtype)


def _check_outputs(made: Pair, leaves: Sequence[Leaf]) -> None:
    if len(made.out_avals) != len(leaves):
        raise JdagError(
            f"{made.name} returned {len(made.out_avals)} arrays for {len(leaves)} "
            "leaves; it returns one new value for each"
        )
    for leaf, aval in zip(leaves, made.out_avals, strict=True):
        if aval != leaf.aval:
            raise JdagError(
                f"{made.name} returned {aval} for {leaf}, which is {leaf.aval}; new "
                "versions keep shape and dtype"
            )
