"""The two halves of a vjp, as schedules list them: I, then W.

I computes the cotangents of inputs, W those of weights: a subset of the tracked inputs.
The jaxpr of a pair's backward is cut, nested jits inlined (`jaxpr_cutting`): I has the
equations that its results need, W the other heavy ones. W reads a stash of values that
I was given or computed, so no equation runs twice, and bits are those of the whole vjp.
Sums over a batch, as for biases and scales, run in I; their results are stashed.

Exceptions:
- Beside a convolution XLA chooses how arrays lie in memory, so sums over a batch may be
  rounded differently, by some units in the last place.
- `jax.checkpoint` is one equation, and both halves may need it. Then each has its own,
  with what that half does not need eliminated: both recompute the forward.
- So is `scan`, which both may need as well: it runs in I, and its results for W are
  stashed. The same holds for loops, branches and functions that came as StableHLO.
- A backward is not cut if it is unjitted, calls back into Python, has other effects or
  sharded types, or if its residuals or cotangents are duals. Then I runs all of it, and
  the stash holds the results of W.
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, compress
from operator import not_
from typing import Any

from jax.tree_util import tree_leaves

from jdag.compute.avals import intern_aval
from jdag.compute.devices import put, working_on
from jdag.compute.duals import any_dual
from jdag.compute.jaxpr_cutting import cut_jaxpr, inlined, variables
from jdag.compute.jaxprs import has_callback
from jdag.compute.pairs import PAIRS_MAX, Pair, input_types, refuse_deleted
from jdag.compute.placed import spread
from jdag.compute.sums import addends_n, few
from jdag.compute.tracing import Residuals, Traced

Flags = tuple[bool, ...]
_Places = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class BackwardHalves:
    """Two halves of one backward, and what its stash holds.

    The stash keeps the arguments at `args_kept` and the outputs at `outputs_kept` of
    the call, the results of I at `results_kept`, and `stash_bytes` beyond these:
    residuals, addends of cotangents, and values that I computed.
    """

    args_kept: _Places
    outputs_kept: _Places
    results_kept: _Places
    stash_bytes: int
    halves: "_Compiled | None" = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class _Compiled:
    """Two jitted functions, and what they read.

    Inputs are numbered: residuals (the rest, arguments, outputs), then sums. `first` is
    called with the inputs at `reads`; its outputs are the results of I and values for
    the stash. `stashed` numbers inputs, then these outputs. `second` takes the stash;
    results of W that I has computed are `handed` out from it, the others are None.
    """

    first: Callable[..., Any]
    reads: _Places
    results: int
    stashed: _Places
    second: Callable[..., Any]
    handed: tuple[int | None, ...]


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Stash:
    """What I leaves for W; it may be used again.

    Attributes:
        values: what W reads; without `halves` its results, duals among them.
        nbytes: what it holds beyond arguments, outputs and results of I.
    """

    values: tuple[Any, ...]
    nbytes: int
    halves: _Compiled | None

    @property
    def keeps(self) -> tuple[Any, ...]:
        """Every array that this keeps alive."""
        return self.values if self.halves else tuple(tree_leaves(self.values))


class Halves:
    """The vjp of a pair, a `Placed` one too, in two halves.

    Args:
        pair: its forward gives the residuals.
        weights: for each tracked input, whether its cotangent is computed by W.

    Raises:
        ValueError: there is not one flag for each tracked input.
    """

    def __init__(self, pair: Pair, weights: Flags) -> None:
        tracked = sum(pair.tracked)
        if len(weights) != tracked:
            raise ValueError(
                f"weights has {len(weights)} flags, and {pair.name} has {tracked} "
                "tracked inputs: give one flag for each"
            )
        self.pair, self.weights = pair, weights
        self._placed = pair.in_devices is not None
        avals = input_types(pair)
        self.input_avals, self.weight_avals = self._split(avals)
        self._homes = self._split([aval.device for aval in avals])

    def cut(self, counts: _Places) -> BackwardHalves:
        """Return what the stash holds, without running anything.

        Args:
            counts: for each tracked output, the number of addends of its cotangent.
        """
        plain = self.pair.pair
        if plain.source.unjitted:
            return self._whole()
        return self._cut(plain.traced, plain.residual_types().held, counts)

    def input_half(
        self, residuals: Residuals, cotangents: Sequence[Sequence[Any]]
    ) -> tuple[tuple[Any, ...], Stash]:
        """Return the cotangents of inputs, and the stash; arguments as `Pair.vjp`."""
        traced, count = residuals.traced, len(cotangents)
        assert count == sum(traced.out_tracked), (self.pair.name, count)
        with self._here():
            if self._placed:
                cotangents = [put(addends, self.pair.device) for addends in cotangents]
            sums = few(cotangents)
        if residuals.dual or any(map(any_dual, sums)):
            return self._uncut(residuals, sums, self._whole())
        held = residuals.held
        found = self._cut(traced, held, tuple(map(len, sums)))
        if (halves := found.halves) is None:
            return self._uncut(residuals, sums, found)
        values = (*chain(*held), *chain(*sums))
        read = [values[place] for place in halves.reads]
        made = self._run(halves.first, read, "residual", residuals.keeps)
        values = (*values, *made)
        keeps = tuple([values[place] for place in halves.stashed])
        results = self._spread(made[: halves.results], 0)
        return results, Stash(keeps, found.stash_bytes, halves)

    def weight_half(self, stash: Stash) -> tuple[Any, ...]:
        """Return the cotangents of weights."""
        if (halves := stash.halves) is None:
            return stash.values
        made = iter(self._run(halves.second, stash.values, "stashed", stash.keeps))
        found = [next(made) if at is None else stash.values[at] for at in halves.handed]
        return self._spread(found, 1)

    def _run(self, half: Any, read: Sequence[Any], what: str, held: Any) -> Any:
        try:
            with self._here():
                return half(*read)
        except (RuntimeError, ValueError, TypeError) as error:
            refuse_deleted(self.pair.name, f"{what} {{}}".format, held, error)
            raise

    def _here(self) -> Any:
        return working_on(self.pair.device) if self._placed else nullcontext()

    def _spread(self, values: Sequence[Any], half: int) -> tuple[Any, ...]:
        if not self._placed:  # They may be tracers, in a segment of a plan.
            return tuple(values)
        return spread(values, self._homes[half])

    def _split(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        inputs = compress(values, map(not_, self.weights))
        return tuple(inputs), tuple(compress(values, self.weights))

    def _whole(self) -> BackwardHalves:
        return BackwardHalves(
            (), (), (), sum([aval.nbytes for aval in self.weight_avals])
        )

    def _uncut(
        self, residuals: Residuals, sums: Sequence[Sequence[Any]], cut: BackwardHalves
    ) -> tuple[tuple[Any, ...], Stash]:
        results, keeps = self._split(self.pair.vjp(residuals, sums))
        nbytes = cut.stash_bytes * (2 if any_dual(keeps) else 1)
        return results, Stash(keeps, nbytes, None)

    def _cut(self, traced: Traced, held: Any, counts: _Places) -> BackwardHalves:
        """The cut of a trace's backward, made once; `held` are residuals or types."""
        counts = tuple(map(addends_n, counts))
        key = (self.weights, counts)
        if (found := traced.cuts.get(key)) is None:
            closed = None if traced.may_raise else _backward(traced, held, counts)
            found = self._whole()
            if closed is not None:
                found = _cut(traced, closed, self.weights, tuple(map(len, held)))
            traced.cuts[key] = found
        return found


halves = lru_cache(maxsize=PAIRS_MAX)(Halves)


def _backward(traced: Traced, held: Any, counts: _Places) -> Any:
    """The jaxpr of a backward, nested jits inlined; None if it cannot be cut."""
    closed = traced.backward.trace(*held, traced.addend_types(counts)).jaxpr
    sharded = any([not aval.sharding.mesh.empty for aval in closed.in_avals])
    if closed.effects or has_callback(closed) or sharded:
        return None
    return inlined(closed)


def _cut(
    traced: Traced, closed: Any, weights: Flags, sizes: Sequence[int]
) -> BackwardHalves:
    """Cut a jaxpr; `sizes` count the rest, and the arguments and outputs kept."""
    first, second, stash = cut_jaxpr(closed, weights)
    results = weights.count(False)
    number: dict[Any, int] = {}
    for index, one in enumerate([*closed.jaxpr.invars, *first.outputs]):
        if variables([one]):
            number.setdefault(one, index)
    stashed = tuple([number[one] for one in stash])
    left, place = second.outputs, {one: index for index, one in enumerate(stash)}
    outputs = compress(closed.jaxpr.outvars, weights)
    handed = [None if any([o is n for n in left]) else place[o] for o in outputs]
    # Where arguments, outputs, sums, results of I and what else it computed begin.
    ends = [*accumulate(sizes), len(closed.jaxpr.invars)]
    ends.append(ends[-1] + results)
    homes = [bisect(ends, at) for at in stashed]
    args, outs, mine = [
        [at - ends[home - 1] for at in compress(stashed, [h == home for h in homes])]
        for home in (1, 2, 4)
    ]
    own = [
        one.aval for one, home in zip(stash, homes, strict=True) if home in (0, 3, 5)
    ]
    nbytes = sum([intern_aval(one.shape, one.dtype, False).nbytes for one in own])
    name = traced.name.rpartition(":")[2]
    compiled = _Compiled(
        first.jitted(closed, f"input_half_{name}"),
        tuple([number[one] for one in first.reads]),
        results,
        stashed,
        second.jitted(closed, f"weight_half_{name}"),
        tuple(handed),
    )
    return BackwardHalves(
        tuple([traced.args_kept[index] for index in args]),
        tuple([traced.outputs_kept[index] for index in outs]),
        tuple(mine),
        nbytes,
        compiled,
    )
