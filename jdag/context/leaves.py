"""Leaves: how programs make, replace and drop leaves on the workers that own them.

Assignments and new leaves are numbered by the worker whose program requests them. An
assignment is sent as one message to each owner; owners work in parallel, and number the
versions (`jdag.engine.leaves`).
Invariants: the number of an assignment or leaf is used once; a refused assignment
changes and stores nothing. A leaf made by `Cluster.keep` is dropped after its last ref
was deleted.
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
    """The replacement of leaves by the results of a call of `fn` on their worker.

    The outputs of the call, in pytree order, are the new values of the leaves `refs`.
    They have the leaves' shapes and dtypes.

    Attributes:
        args: the arguments of `fn`. Refs among them are on the leaves' worker.
        purpose: a text that is added to the call site in errors.
        pair: a traced function that runs in place of `fn`, or None.
    """

    fn: Callable[..., Any]
    refs: Sequence[Ref]
    args: tuple[Any, ...]
    purpose: str = ""
    pair: Pair | None = None


class _Call(NamedTuple):
    """A traced call, with the key and device of each argument (None: the default)."""

    pair: Pair
    keys: list[Key]
    sources: list[str | None]
    site: str


@dataclass(slots=True)
class _Draft:
    """An assignment that is not complete yet. It changes or makes the `leaves`."""

    path: tuple[int, ...]
    parts: list[Assignment] = field(default_factory=list)
    stored: list[tuple[Key, Any]] = field(default_factory=list)
    constants: dict[int, tuple[Key, Any]] = field(default_factory=dict)  # By `id()`.
    leaves: dict[Leaf, None] = field(default_factory=dict)
    written: dict[Leaf, Any] = field(default_factory=dict)  # Values from the caller.


class Assignments:
    """Makes, replaces and drops leaves for one program."""

    # The main program's `Recovery`, with recover=True, which copies assigned values.
    recovery: Any = None

    def __init__(self, state: ClusterState, port: ProgramPort) -> None:
        self.state = state
        self._port = port
        self._numbers = state.numbers(port.worker)
        # Leaves made by `Cluster.keep`, and plans, whose last ref was deleted.
        self._loose: deque[tuple[Key, Worker]] = deque()
        self.unplanned: deque[tuple[Any, Worker]] = deque()

    def put(self, place: str, tree: Any, tracked: bool = True) -> Any:
        values, treedef = flatten(tree, what="the tree for cluster.put")
        indices = indices_of_arrays("cluster.put", tree, values)
        # A tree that has only constants is an error, which names its first leaf.
        indices = indices or list(range(len(values)))
        arrays = [self._array(values[index], tree, index) for index in indices]
        refs = self.write([place] * len(arrays), arrays, [tracked] * len(arrays))
        for index, ref in zip(indices, refs, strict=True):
            values[index] = ref
        return unflatten(treedef, values)

    def write(
        self,
        places: Sequence[Ref | str],
        values: Sequence[Any],
        tracked: Sequence[bool],
    ) -> list[Ref]:
        """Write values into leaves, all of them or none; return refs to the leaves.

        Args:
            places: the destination of each value. The value becomes the next version of
                a leaf, or a new leaf on the worker or device of this name.
            values: arrays of strong type, of the shapes and dtypes of the leaves.
            tracked: for each value, whether a new leaf may have gradients.
        """
        draft = self._draft()
        written: list[Leaf] = []
        groups: dict[tuple[str, str | None, bool], list[tuple[Leaf, Any]]] = {}
        for place, value, is_tracked in zip(places, values, tracked, strict=True):
            if isinstance(place, str):
                worker, device = self.state.place(place, "cluster.put")
                leaf = self._new(worker, aval_of(value).strong.on(device), is_tracked)
            else:
                leaf = self.leaf(place)
            written.append(leaf)
            draft.written[leaf] = value
            kind = (leaf.id.worker, leaf.aval.device, isinstance(place, str))
            groups.setdefault(kind, []).append((leaf, value))
        for (worker, device, is_new), group in groups.items():
            leaves = [leaf for leaf, _ in group]
            keys = [leaf.first if is_new else leaf.key for leaf in leaves]
            call = None
            if is_new and device is None:
                draft.stored += zip(keys, [value for _, value in group], strict=True)
            else:
                # The worker copies them to the device, and numbers their versions.
                args = [v.struct() if isinstance(v, Aval) else v for _, v in group]
                call = self._traced(draft, worker, Change(transferred, (), tuple(args)))
            add_part(draft, keys, leaves, call)
        self._tell(draft)
        return [self.state.leaf_ref(leaf) for leaf in written]

    def _array(self, value: Any, tree: Any, index: int) -> Any:
        try:
            if type(value) in NUMBERS and value is not tree:
                raise JdagError(NO_LEAF.format(value))
            if is_ref(value):
                raise JdagError(
                    f"a ref ({value!r}) is already on a worker; ctx.move copies it"
                )
            if isinstance(value, jax.core.Tracer):
                raise ContextError("a tracer is not an array: jdag runs outside of jit")
            if isinstance(value, jax.ShapeDtypeStruct) and not self.state.abstract:
                raise JdagError(
                    "a ShapeDtypeStruct stands for an array only with values='abstract'"
                )
            value = frozen(value)
            aval = aval_of(value).strong
        except JdagError as error:
            path = paths(tree)[index]
            name = f"cluster.put, at {path}" if path else "cluster.put"
            raise type(error)(f"{name}: {error}") from None
        return aval if self.state.abstract else stored(value)

    def make(
        self,
        worker: str,
        device: str | None,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        draft = self._draft()
        call = self._traced(draft, worker, Change(fn, (), args), kwargs)
        leaves = [self._new(worker, aval.on(device)) for aval in call.pair.out_avals]
        if leaves:
            add_part(draft, [leaf.first for leaf in leaves], leaves, call)
        self._tell(draft)
        refs = [self.state.leaf_ref(leaf) for leaf in leaves]
        return unflatten(call.pair.out_tree, refs)

    def copy(self, tree: Any, tracked: bool) -> Any:
        refs, form = flatten_refs(tree, is_ref)
        leaves = {ref: self.leaf(ref) for ref in refs}
        copies = {
            ref: self._new(ref.owner, ref.aval, tracked and not leaf.id.untracked)
            for ref, leaf in leaves.items()
        }
        self._transfer(copies)
        return unflatten(form, [self.state.leaf_ref(copies[ref]) for ref in refs])

    def keep(self, tree: Any, *, apart: bool = False) -> Any:
        """Make untracked leaves of values on their workers; see `Cluster.keep`.

        With `apart` each leaf is made by a separate call, so that a failure of one call
        affects only that leaf.
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

    def _transfer(self, leaf_of: Mapping[Ref, Leaf], apart: bool = False) -> None:
        groups: dict[tuple[str, Ref | None], list[Ref]] = {}
        for ref in leaf_of:
            groups.setdefault((ref.place, ref if apart else None), []).append(ref)
        draft = self._draft()
        for group in groups.values():
            change = Change(transferred, (), tuple(group))
            call = self._traced(draft, group[0].owner, change)
            leaves = [leaf_of[ref] for ref in group]
            add_part(draft, [leaf.first for leaf in leaves], leaves, call)
        self._tell(draft)

    def restore(self, sources: Mapping[Leaf, Any], absent: Container[Leaf]) -> None:
        """Assign to each leaf its source: a ref on the leaf's worker, or an array.

        Leaves in `absent` do not exist on their workers, and are made there.
        """
        draft = self._draft()
        for leaf, source in sources.items():  # One call for each: each may fail alone.
            value = source.struct() if isinstance(source, Aval) else source
            change = Change(transferred, (), (value,))
            call = self._traced(draft, leaf.id.worker, change)
            add_part(draft, [leaf.first if leaf in absent else leaf.key], [leaf], call)
        self._tell(draft)

    def assign(self, changes: Sequence[Change]) -> None:
        """Make all changes. If this raises, no change is made. See `Cluster.update`."""
        self._tell(self._drafted(changes))

    def planned(self, changes: Sequence[Change]) -> Sequence[Assignment]:
        """Return the parts of the assignment that `assign` would send; send nothing."""
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
        owner = self.leaf(change.refs[0]).id.worker
        return self._traced(self._draft(), owner, change).pair

    def drop(self, refs: Any) -> None:
        leaves = [self.leaf(ref) for ref in flatten_refs(refs, is_ref)[0]]
        self._port.tell(Dropped(tuple(leaf.id for leaf in leaves)))
        for leaf in leaves:
            leaf.dropped = True
            self.state.leaves.pop(leaf.id, None)
        if self.recovery is not None:
            self.recovery.dropped(leaves)

    def forget(self) -> None:
        while self.unplanned and not self.state.closed:
            self._port.tell(Unplanned(self.unplanned.popleft()[0]))
        if not self._loose:
            return
        ids = sorted([self._loose.popleft()[0].name for _ in range(len(self._loose))])
        leaves = {} if self.state.closed else self.state.leaves
        if dropped := [leaves[id] for id in ids if id in leaves]:
            self.drop(list(map(self.state.leaf_ref, dropped)))

    def admit(self, ref: Ref, what: str = "a fetch") -> None:
        self.state.check_own(ref)
        if ref.leaf is None:
            ref.holder.check(what, ref)

    def leaf(self, ref: Ref) -> Leaf:
        self.admit(ref)
        if ref.leaf is None:
            raise JdagError(
                f"{ref!r} is not a leaf; cluster.put and cluster.make return leaves"
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
        """Trace the call of a change. Add each of its constants to the draft once."""
        fn, args, implicit = called(change.fn, change.args)
        parts = split(args, kwargs or {}, self.state.is_named, implicit)
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
                constant = draft.constants.setdefault(id(value), (key, value))
                keys[position] = constant[0]
        site = f"{call_site()}{change.purpose and f', {change.purpose}'}"
        untracked = (False,) * parts.size
        pair = change.pair
        pair = pair or traced(fn, parts, tuple(avals), untracked, worker, site)
        return _Call(pair, keys, sources, site)

    def _check_owner(self, worker: str, fn: Callable[..., Any], ref: Ref) -> None:
        self.admit(ref)
        hold = ref.hold if ref.leaf is None else None
        if hold is not None and ref.holder.port.worker != self._port.worker:
            hold.keep()  # Drops by two workers could arrive in any order.
        if ref.owner != worker:
            raise JdagError(
                f"{name_of(fn)} makes leaves on {worker!r}, but an argument, {ref!r}, "
                f"is on {ref.owner!r}; leaves are computed on their own worker: "
                f"ctx.move({named(worker)!r}, ref) first"
            )

    def _tell(self, draft: _Draft) -> None:
        """Send an assignment to the engine. Its number is used even if this raises."""
        if not draft.parts:
            return
        self._numbers.assignments += 1
        stored = (*draft.stored, *draft.constants.values())
        values = [(key, self.state.value(value)) for key, value in stored]
        self._port.tell(Assigned(draft.path, tuple(draft.parts)), values)
        self.state.leaves.update({leaf.id: leaf for leaf in draft.leaves})
        if self.recovery is not None:
            self.recovery.assigned(draft.leaves, draft.written)


def add_part(
    draft: _Draft, outputs: Sequence[Key], leaves: Sequence[Leaf], call: _Call | None
) -> None:
    for leaf in leaves:
        if leaf in draft.leaves:
            raise JdagError(
                f"{leaf} occurs twice; an assignment replaces a leaf only once"
            )
        draft.leaves[leaf] = None
    arguments: Sequence[Key] = ()
    pair: Pair | Placed | None = None
    if call is not None:
        arguments, targets = call.keys, [leaf.aval.device for leaf in leaves]
        pair = placed(call.pair, targets[0], call.sources, targets)
    part = Assignment(
        (*draft.path, len(draft.parts)),
        pair,
        tuple(arguments),
        tuple(outputs),
        tuple(leaf.aval for leaf in leaves),
        str(call_site()) if call is None else call.site,
    )
    draft.parts.append(part)


def leafwise_changes(
    fn: Callable[..., Any], refs: Any, args: Sequence[Any]
) -> list[Change]:
    leaves, treedef = flatten_refs(refs, is_ref)
    columns = [_column(arg, number, treedef) for number, arg in enumerate(args)]
    rows = zip(leaves, *columns, strict=True)
    return [Change(fn, [ref], (ref, *rest)) for ref, *rest in rows]


def _column(arg: Any, number: int, treedef: Any) -> Sequence[Any]:
    leaves, structure = flatten(arg)
    if not any(map(is_ref, leaves)):
        return [arg] * treedef.num_leaves
    if all(is_ref(leaf) or is_constant(leaf) for leaf in leaves):
        leaves, structure = flatten_refs(arg, is_ref)
    if treedef != structure:  # In this order: a treedef calls itself equal to a Form.
        raise JdagError(
            f"argument {number} of cluster.update contains refs, so its structure must "
            f"be that of the leaves, {treedef}, but is {structure}"
        )
    return leaves


def stored(value: Any) -> Any:
    """Convert a frozen array to a strong, canonical dtype, as leaves have it."""
    aval = aval_of(value)
    dtype: Any = jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True)
    is_canonical = is_array(value) and not aval.weak and value.dtype == dtype
    return value if is_canonical else jnp.asarray(value, dtype)


def _check_outputs(pair: Pair, leaves: Sequence[Leaf]) -> None:
    if len(pair.out_avals) != len(leaves):
        raise JdagError(
            f"{pair.name} returned {len(pair.out_avals)} arrays for {len(leaves)} "
            "leaves; expected one new value for each"
        )
    for leaf, aval in zip(leaves, pair.out_avals, strict=True):
        if aval != leaf.aval:
            raise JdagError(
                f"{pair.name} returned {aval} for {leaf}, which is {leaf.aval}; a new "
                "version must have the same shape and dtype"
            )
