"""Refs: data that name arrays on workers, and reading what they name.

A ref is no array and never becomes one by accident: arithmetic, `jnp`, `float` and
indexing say what to do instead. To JAX's pytrees a ref is a leaf.
"""

import gc
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from jdag.compute.avals import Aval
from jdag.compute.duals import primal_of
from jdag.compute.pytrees import flatten, flatten_refs, unflatten
from jdag.compute.refs import RefBase, RefData, is_ref
from jdag.engine.protocol import (
    LEAF_KINDS,
    Failure,
    Key,
    LeafId,
    LeafKey,
    NewestKey,
    Worker,
    named,
)
from jdag.errors import ContextError


class Leaf:
    """A leaf as its cluster knows it, shared by all of its refs.

    `key` names its newest version, and where it is assigned the next one: which that
    is, only its owner knows. It is on the worker that `id` names.
    """

    __slots__ = ("__weakref__", "aval", "dropped", "held", "id", "key")

    def __init__(self, id: LeafId, aval: Aval) -> None:
        self.id = id
        self.aval = aval
        self.key = NewestKey(None, id, 0)
        self.dropped = False
        self.held: Callable[[], Hold | None] = lambda: None  # Of what is kept, weakly.

    def moved(self, worker: Worker) -> None:
        """It was lost, and is to be made again on this worker."""
        self.id = LeafId(worker, self.id.number)
        self.key = NewestKey(None, self.id, 0)
        if (hold := self.held()) is not None:
            hold.moved(self.key, worker)

    @property
    def tracked(self) -> bool:
        """Whether cotangents flow to it, by its dtype and as it was made."""
        return self.aval.inexact and not self.id.untracked

    @property
    def first(self) -> Key:
        """The key of the version that it is made with."""
        return LeafKey(None, self.id, 0)

    def __str__(self) -> str:
        return str(self.id)


class Hold:
    """Shared by all refs of a program to one value; when it goes, the value may go.

    Python counts refs, and where the last one goes is part of the program. When Python
    collects cycles is not: a value whose refs only the collector finds lives as long as
    its context. It runs on any thread, and others go on meanwhile.
    """

    __slots__ = ("__weakref__", "_copies", "_key", "_loose", "_worker")

    collecting: ClassVar[int] = 0  # The thread that Python's collector of cycles is on.
    # An attribute: as Python ends, the globals of this module may go before a ref.
    _thread = staticmethod(get_ident)

    def __init__(
        self, loose: deque[tuple[Key, Worker]], key: Key, worker: Worker
    ) -> None:
        self._loose = loose
        self._key = key
        self._worker = worker
        self._copies: dict[Any, Ref] | None = None

    @property
    def copies(self) -> dict[Any, "Ref"]:
        """What was made of the value for other workers: it goes when this does."""
        if self._copies is None:
            self._copies = {}
        return self._copies

    @classmethod
    def collector(cls, phase: str, info: dict[str, int]) -> None:
        """Python's collector of cycles begins or ends."""
        del info
        cls.collecting = get_ident() if phase == "start" else 0

    def __del__(self) -> None:
        if self.collecting != self._thread():
            self._loose.append((self._key, self._worker))

    def moved(self, key: Key, worker: Worker) -> None:
        """The value has another name, on another worker."""
        self._key, self._worker = key, worker

    def keep(self) -> None:
        """Let the value live as long as its context."""
        self._loose = deque()


gc.callbacks.append(Hold.collector)


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(self: "Ref", *others: object, **options: object) -> NoReturn:
        raise self.refusal(what)

    return refuse


class Ref(RefBase):
    """Names an array on a worker; made by a cluster or a context, never by users.

    Attributes:
        holder: the program, or the state of the cluster, that reads it (`read`) and
            notes failures (`seen`); refs never leave the `state` of their holder.
        tracked: whether cotangents flow back through it: it is inexact, descends from a
            tracked leaf, and no `jdag.stop_gradient` cut it off.

    Shape and dtype are known before the array is computed. Refs of one leaf are equal
    and hash alike, whatever their version.
    """

    __slots__ = (
        "_key", "_owner", "aval", "descends", "hold", "holder", "leaf", "tracked",
    )  # fmt: skip

    def __init__(
        self,
        holder: Any,
        key: Key,
        owner: Worker,
        aval: Aval,
        tracked: bool,
        descends: LeafId | None = None,
        *,
        leaf: Leaf | None = None,
        hold: Hold | None = None,
    ) -> None:
        self.holder = holder
        self._key = key
        self._owner = owner
        self.aval = aval
        self.tracked = tracked
        self.descends = descends
        self.leaf = leaf
        self.hold = hold

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # What `copy.copy`, `copy.deepcopy` and `pickle` ask for.
        raise ContextError(
            f"a copy of {self!r} would be another name of the same array, and follow "
            "its changes: cluster.copy(refs) copies leaves, on their workers; "
            "jdag.fetch(refs) gives values, which can be copied and pickled"
        )

    @property
    def key(self) -> Key:
        """The name of the value; of a leaf, that of whichever version is the newest."""
        leaf = self.leaf
        return self._key if leaf is None else leaf.key

    @property
    def owner(self) -> Worker:
        """Which incarnation of a worker has the array."""
        leaf = self.leaf
        return self._owner if leaf is None else leaf.id.worker

    @property
    def worker(self) -> str:
        """The name of the worker where the array is."""
        return named(self.owner)

    @property
    def place(self) -> str:
        """Where the array is, as a call names it: `ps0`, or `ps0/cpu:1`."""
        device = self.device
        return self.worker if device is None else f"{self.worker}/{device}"

    @property
    def device(self) -> str | None:
        """The device of the worker that the array is on, None for the default one."""
        return self.aval.device

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the array: numpy's, or a key type of JAX."""
        return self.aval.dtype

    @property
    def size(self) -> int:
        """How many elements the array has."""
        return self.aval.size

    @property
    def ndim(self) -> int:
        """How many axes the array has."""
        return len(self.aval.shape)

    @property
    def data(self) -> RefData:
        """The same without its holder."""
        return RefData(self.key, self.owner, self.aval, self.tracked, self.descends)

    @property
    def described(self) -> str:
        """What it names, for error messages."""
        key = self.key
        if key.kind in LEAF_KINDS:
            return str(key.name)
        if key.kind == "gradient":
            return f"the gradient of {key.name}"
        if key.kind == "slot":
            return "an input of the program, or computed from inputs outside of calls"
        path = ".".join(map(str, key.name))
        return f"output {key.index} of call {path} on {self.owner}"

    def fetch(self) -> Any:
        """Return the value, as a JAX array; waits until it is computed.

        Only reads: no node, no edge. In abstract mode a `jax.ShapeDtypeStruct`. The
        array may be the one that the worker holds, not a copy: to donate it to a jitted
        function would destroy that too, so donate `jnp.copy` of it.

        Raises:
            RemoteError: what was to compute it failed.
            WorkerLost: its worker is gone.
            ContextError: its context has ended, or the leaf was dropped.
        """
        (value,) = self.holder.read((self,))
        if isinstance(value, Failure):
            raise self.holder.seen(value)
        return primal_of(value)

    def refusal(self, what: str) -> ContextError:
        """Return the error that says what to do in place of `what`."""
        return ContextError(
            f"{what} takes an array, and this is a ref, which only names one "
            f"({self!r}). Compute with it where it lives: ctx.call(worker, fn, ref), "
            "with all operations inside of fn. Or read it: ref.fetch(), "
            "jdag.fetch(refs); no gradient flows through that"
        )

    def __repr__(self) -> str:
        what = self.described
        if self.key.context is not None:
            what = f"{what} in context {self.key.context}"
        if self.device is not None:
            what = f"{what}, {self.device}"
        tracked = "tracked" if self.tracked else "untracked"
        return f"Ref({self.aval}, {what}, {tracked})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ref):
            if isinstance(other, int | float | complex) or hasattr(other, "__array__"):
                raise self.refusal("==")
            return NotImplemented
        return self.key == other.key and self.holder.state is other.holder.state

    def __hash__(self) -> int:
        leaf = self.leaf  # Its name may change, its number does not.
        return hash(self._key if leaf is None else leaf.id.number)

    @property
    def __jax_array__(self) -> NoReturn:
        # A property: JAX only looks whether it is there, and then raises its own error.
        raise self.refusal("JAX")

    def __format__(self, spec: str) -> str:
        if spec:
            raise self.refusal(f"the format {spec!r}")
        return repr(self)

    if not TYPE_CHECKING:  # To a type checker, what a ref lacks stays an error.

        def __getattr__(self, name: str) -> NoReturn:
            message = f"a Ref has no attribute {name!r}"
            if not name.startswith("_"):
                message = f"{message}: {self.refusal(f'.{name}')}"
            raise AttributeError(message, name=name, obj=self)


# What arrays can do and refs refuse, by the methods of Python.
_REFUSED = {
    "numpy": "array",
    "float()": "float",
    "int()": "int",
    "complex()": "complex",
    "an index": "index",
    "a condition (if, while, and, or, not)": "bool",
    "len()": "len",
    "iteration": "iter",
    "in": "contains",
    "indexing": "getitem",
    "assignment to elements": "setitem",
    "arithmetic": "neg pos abs invert",
    "rounding": "round trunc floor ceil",
    **{"+": "add radd", "-": "sub rsub", "*": "mul rmul", "@": "matmul rmatmul"},
    **{"/": "truediv rtruediv", "//": "floordiv rfloordiv", "**": "pow rpow"},
    **{"%": "mod rmod divmod rdivmod", "<<": "lshift rlshift", ">>": "rshift rrshift"},
    **{"&": "and rand", "|": "or ror", "^": "xor rxor"},
    **{"<": "lt", "<=": "le", ">": "gt", ">=": "ge"},
}
for _what, _names in _REFUSED.items():
    for _name in _names.split():
        setattr(Ref, f"__{_name}__", _refusing(_what))


def fetch(tree: Any) -> Any:
    """Return the pytree with the value of each ref in its place; the rest stays.

    All refs of one program are read by one request. Waits until all are computed.

    Raises:
        JdagError: as `Ref.fetch` does, for the first ref that has no value.
    """
    leaves, treedef = flatten(tree)
    return unflatten(treedef, [primal_of(value) for value in read_refs(leaves)])


def read_refs(leaves: Sequence[Any]) -> list[Any]:
    """Return a list with the value of each ref in its place, duals as they are.

    Raises:
        JdagError: as `fetch` does.
    """
    indices: dict[int, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Ref):
            indices.setdefault(id(leaf.holder), []).append(index)
    values = list(leaves)
    for mine in indices.values():
        refs = [leaves[index] for index in mine]
        for index, value in zip(mine, refs[0].holder.read(refs), strict=True):
            values[index] = value
    for leaf, value in zip(leaves, values, strict=True):
        if isinstance(value, Failure):
            raise leaf.holder.seen(value)
    return values


def stop_gradient(refs: Any) -> Any:
    """Return the same refs, untracked: to what computes on them they are constants.

    Also what descends from a gradient may be differentiated again from there.

    Args:
        refs: a ref, or a pytree of refs.

    Raises:
        JdagError: a leaf of the pytree is not a ref.
    """
    leaves, treedef = flatten_refs(refs, is_ref)
    stopped = [
        Ref(r.holder, r.key, r.owner, r.aval, False, leaf=r.leaf, hold=r.hold)
        for r in leaves
    ]
    return unflatten(treedef, stopped)
