"""Refs: names of arrays on workers, and reading their values.

A ref is not an array and is never converted to one: arithmetic, `jnp`, `float` and
indexing raise an error with the remedy. In JAX's pytrees a ref is a leaf.
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
    """The record of a leaf in its cluster, shared by all of its refs.

    `key` names the newest version; during an assignment, the next version. Only the
    owner, the worker of `id`, numbers versions.
    """

    __slots__ = ("__weakref__", "aval", "dropped", "held", "id", "key")

    def __init__(self, id: LeafId, aval: Aval) -> None:
        self.id = id
        self.aval = aval
        self.key = NewestKey(None, id, 0)
        self.dropped = False
        # For a leaf that `Cluster.keep` made: a weak reference to its hold.
        self.held: Callable[[], Hold | None] = lambda: None

    def moved(self, worker: Worker) -> None:
        """Make this worker the owner of a lost leaf, which is restored there."""
        self.id = LeafId(worker, self.id.number)
        self.key = NewestKey(None, self.id, 0)
        if (hold := self.held()) is not None:
            hold.moved(self.key, worker)

    @property
    def tracked(self) -> bool:
        return self.aval.inexact and not self.id.untracked

    @property
    def first(self) -> Key:
        return LeafKey(None, self.id, 0)

    def __str__(self) -> str:
        return str(self.id)


class Hold:
    """All refs of a program to a value share a hold, whose deletion frees the value.

    Reference counting deletes the last ref at a fixed point of the program, but the
    cycle collector at any time. If the collector deletes it, the value is not freed
    until its context ends. The collector may run on any thread, while others continue.
    """

    __slots__ = ("__weakref__", "_copies", "_key", "_loose", "_worker")

    collecting: ClassVar[int] = 0  # The thread that runs the cycle collector.
    # An attribute, since module globals may be deleted before a ref as Python exits.
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
        """Copies of the value for other workers. They are freed with the value."""
        if self._copies is None:
            self._copies = {}
        return self._copies

    @classmethod
    def collector(cls, phase: str, info: dict[str, int]) -> None:
        """Record which thread runs the cycle collector; `gc` calls this."""
        del info
        cls.collecting = get_ident() if phase == "start" else 0

    def __del__(self) -> None:
        if self.collecting != self._thread():
            self._loose.append((self._key, self._worker))

    def moved(self, key: Key, worker: Worker) -> None:
        self._key, self._worker = key, worker

    def keep(self) -> None:
        """Keep the value until its context ends, even if it has no refs."""
        self._loose = deque()


gc.callbacks.append(Hold.collector)


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(self: "Ref", *others: object, **options: object) -> NoReturn:
        raise self.refusal(what)

    return refuse


class Ref(RefBase):
    """The name of an array on a worker; clusters and contexts make refs.

    Attributes:
        holder: the program frame that reads the value and records failures; for leaves,
            the cluster's state.
        tracked: whether cotangents flow back through the ref: its value is inexact and
            depends on a tracked leaf, not only through `jdag.stop_gradient`.

    Shape and dtype are known before the array is computed. All refs of one leaf are
    equal and have the same hash.
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
        # `copy.copy`, `copy.deepcopy` and `pickle` call this.
        raise ContextError(
            f"a copy of {self!r} would name the same array, not a copy of it: "
            "cluster.copy(refs) copies leaves on their workers; jdag.fetch(refs) "
            "returns values, which can be copied and pickled"
        )

    @property
    def key(self) -> Key:
        """The key of the value. For a leaf, this is the key of its newest version."""
        leaf = self.leaf
        return self._key if leaf is None else leaf.key

    @property
    def owner(self) -> Worker:
        """The incarnation of the worker that stores the array."""
        leaf = self.leaf
        return self._owner if leaf is None else leaf.id.worker

    @property
    def located(self) -> tuple[Key, Worker]:
        """The `key` and the `owner`."""
        leaf = self.leaf
        return (self._key, self._owner) if leaf is None else (leaf.key, leaf.id.worker)

    @property
    def worker(self) -> str:
        """The name of the worker that stores the array."""
        return named(self.owner)

    @property
    def place(self) -> str:
        """The worker or device that stores the array, as `ps0` or `ps0/cpu:1`."""
        device = self.device
        return self.worker if device is None else f"{self.worker}/{device}"

    @property
    def device(self) -> str | None:
        """The worker's device that stores the array. None: its default device."""
        return self.aval.device

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the array: a dtype of numpy, or a key type of JAX."""
        return self.aval.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.aval.size

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.aval.shape)

    @property
    def data(self) -> RefData:
        """The ref without its holder, as data that can be sent to other workers."""
        return RefData(self.key, self.owner, self.aval, self.tracked, self.descends)

    @property
    def described(self) -> str:
        """A description of the value for error messages."""
        key = self.key
        if key.kind in LEAF_KINDS:
            return str(key.name)
        if key.kind == "gradient":
            return f"the gradient of {key.name}"
        if key.kind == "slot":
            return "an input of the program, or a value computed outside of calls"
        path = ".".join(map(str, key.name))
        return f"output {key.index} of call {path} on {self.owner}"

    def fetch(self) -> Any:
        """Wait until the value is computed; return it as a JAX array.

        No gradient flows through a fetched value. In abstract mode it is a
        `jax.ShapeDtypeStruct`. The array may be the worker's own, not a copy: do not
        donate it to a jitted function; donate `jnp.copy` of it.

        Raises:
            RemoteError: the computation of the value failed.
            WorkerLost: its worker is lost.
            ContextError: its context has ended, or the leaf was dropped.
        """
        (value,) = self.holder.read((self,))
        if isinstance(value, Failure):
            raise self.holder.seen(value)
        return primal_of(value)

    def refusal(self, what: str) -> ContextError:
        """Return the error of an operation that refs do not support."""
        return ContextError(
            f"{what} takes an array, but {self!r} is a ref, which only names an array. "
            "Compute on its worker: ctx.call(worker, fn, ref), with all operations "
            "inside of fn. Or read it: ref.fetch() or jdag.fetch(refs); no gradient "
            "flows through a fetched value"
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
        leaf = self.leaf  # Recovery may change its worker, but not its number.
        return hash(self._key if leaf is None else leaf.id.number)

    @property
    def __jax_array__(self) -> NoReturn:
        # A property, since JAX would only test for a method and raise its own error.
        raise self.refusal("JAX")

    def __format__(self, spec: str) -> str:
        if spec:
            raise self.refusal(f"the format {spec!r}")
        return repr(self)

    if not TYPE_CHECKING:  # Type checkers report unknown attributes themselves.

        def __getattr__(self, name: str) -> NoReturn:
            message = f"a Ref has no attribute {name!r}"
            if not name.startswith("_"):
                message = f"{message}: {self.refusal(f'.{name}')}"
            raise AttributeError(message, name=name, obj=self)


# Operations of arrays that refs refuse, with the names of their special methods.
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
    """Return the pytree with each ref replaced by its value; other leaves stay.

    Waits until all values are computed. One request reads all refs of a program.

    Raises:
        JdagError: the error of `Ref.fetch` for the first ref that has no value.
    """
    leaves, treedef = flatten(tree)
    return unflatten(treedef, [primal_of(value) for value in read_refs(leaves)])


def read_refs(leaves: Sequence[Any]) -> list[Any]:
    """Return the list with each ref replaced by its value, which may be a dual."""
    by_holder: dict[int, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Ref):
            by_holder.setdefault(id(leaf.holder), []).append(index)
    values = list(leaves)
    for indices in by_holder.values():
        refs = [leaves[index] for index in indices]
        for index, value in zip(indices, refs[0].holder.read(refs), strict=True):
            values[index] = value
    for leaf, value in zip(leaves, values, strict=True):
        if isinstance(value, Failure):
            raise leaf.holder.seen(value)
    return values


def stop_gradient(refs: Any) -> Any:
    """Return untracked refs to the same values, which calls treat as constants.

    A value that was computed from a gradient may then be used in a new loss.

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
