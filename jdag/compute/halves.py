"""The two halves of a vjp, I and W, which schedules list as separate actions.

I computes the cotangents of inputs, W those of weights, a subset of the tracked inputs.
The jaxpr of a pair's backward is inlined and cut (`jaxpr_cutting`): I gets the
equations on which its results depend, and W gets the remaining heavy equations. W reads
a stash of values that I read or computed, so no equation runs twice, and the results
are bitwise equal to those of the whole vjp. Sums over a batch, as for biases and
scales, run in I; their results are stashed.

Exceptions:
- Next to a convolution XLA chooses the memory layout of arrays, so sums over a batch
  may differ by some units in the last place.
- `jax.checkpoint` is one equation. If both halves need it, each gets a copy without the
  parts that only the other needs, and both recompute the forward.
- A `scan` that both halves need runs in I, which stashes its results for W. The same
  holds for other loops, for branches, and for functions received as StableHLO.
- A backward is not cut if it is unjitted, calls back into Python, has other effects or
  sharded types, or if its residuals or cotangents are duals. Then I computes all of it,
  and the stash holds the results of W.
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
from jdag.compute.sums import addends_n, limited
from jdag.compute.tracing import Residuals, Traced

Flags = tuple[bool, ...]
_Places = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class BackwardHalves:
    """Two halves of one backward, and the contents of its stash.

    The stash keeps arguments and outputs of the call at `args_kept` and `outputs_kept`,
    results of I at `results_kept`, and `stash_bytes` bytes of other values:
    residuals, addends of cotangents, and values computed by I.
    """

    args_kept: _Places
    outputs_kept: _Places
    results_kept: _Places
    stash_bytes: int
    halves: "_Compiled | None" = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class _Compiled:
    """Two jitted functions, and the values that they read.

    Inputs are numbered: residuals (other arrays, arguments, outputs), then sums.
    `first` takes the inputs at `reads`. It returns the results of I, then values for
    the stash; these are numbered after the inputs. `stashed` lists the numbers of the
    values in the stash, which `second` takes. For each result of W, `handed` is its
    index in the stash if I computed it, else None.
    """

    first: Callable[..., Any]
    reads: _Places
    results: int
    stashed: _Places
    second: Callable[..., Any]
    handed: tuple[int | None, ...]


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Stash:
    """The values that half I passes to half W. A stash may be used several times.

    `values` are the inputs of W or, if `halves` is None, its results. `nbytes` excludes
    arguments, outputs and results of I.
    """

    values: tuple[Any, ...]
    nbytes: int
    halves: _Compiled | None

    @property
    def keeps(self) -> tuple[Any, ...]:
        return self.values if self.halves else tuple(tree_leaves(self.values))


class Halves:
    """The vjp of a pair, which may be a `Placed` pair, in two halves.

    `weights` says for each tracked input whether W computes its cotangent. A wrong
    number of flags raises ValueError.
    """

    def __init__(self, pair: Pair, weights: Flags) -> None:
        tracked = sum(pair.tracked)
        if len(weights) != tracked:
            raise ValueError(
                f"weights has {len(weights)} flags, but {pair.name} has {tracked} "
                "tracked inputs; give one flag for each"
            )
        self.pair, self.weights = pair, weights
        self._placed = pair.in_devices is not None
        avals = input_types(pair)
        self.input_avals, self.weight_avals = self._split(avals)
        self._homes = self._split([aval.device for aval in avals])

    def cut(self, counts: _Places) -> BackwardHalves:
        plain = self.pair.pair
        if plain.source.unjitted:
            return self._undivided()
        return self._cut(plain.traced, plain.residual_types().held, counts)

    def input_half(
        self, residuals: Residuals, cotangents: Sequence[Sequence[Any]]
    ) -> tuple[tuple[Any, ...], Stash]:
        traced, count = residuals.traced, len(cotangents)
        assert count == sum(traced.out_tracked), (self.pair.name, count)
        with self._on_device():
            if self._placed:
                cotangents = [put(addends, self.pair.device) for addends in cotangents]
            sums = limited(cotangents)
        if residuals.dual or any(map(any_dual, sums)):
            return self._run_undivided(residuals, sums, self._undivided())
        held = residuals.held
        cut = self._cut(traced, held, tuple(map(len, sums)))
        if (halves := cut.halves) is None:
            return self._run_undivided(residuals, sums, cut)
        values = (*chain(*held), *chain(*sums))
        read = [values[place] for place in halves.reads]
        outputs = self._run(halves.first, read, "residual", residuals.keeps)
        values = (*values, *outputs)
        stashed = tuple([values[place] for place in halves.stashed])
        results = self._spread(outputs[: halves.results], 0)
        return results, Stash(stashed, cut.stash_bytes, halves)

    def weight_half(self, stash: Stash) -> tuple[Any, ...]:
        if (halves := stash.halves) is None:
            return stash.values
        computed = iter(self._run(halves.second, stash.values, "stashed", stash.keeps))
        results = [
            next(computed) if index is None else stash.values[index]
            for index in halves.handed
        ]
        return self._spread(results, 1)

    def _run(
        self, half: Any, inputs: Sequence[Any], description: str, arrays: Any
    ) -> Any:
        try:
            with self._on_device():
                return half(*inputs)
        except (RuntimeError, ValueError, TypeError) as error:
            refuse_deleted(self.pair.name, f"{description} {{}}".format, arrays, error)
            raise

    def _on_device(self) -> Any:
        return working_on(self.pair.device) if self._placed else nullcontext()

    def _spread(self, values: Sequence[Any], half: int) -> tuple[Any, ...]:
        if not self._placed:  # The values may be tracers, in a segment of a plan.
            return tuple(values)
        return spread(values, self._homes[half])

    def _split(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        inputs = compress(values, map(not_, self.weights))
        return tuple(inputs), tuple(compress(values, self.weights))

    def _undivided(self) -> BackwardHalves:
        nbytes = sum([aval.nbytes for aval in self.weight_avals])
        return BackwardHalves((), (), (), nbytes)

    def _run_undivided(
        self, residuals: Residuals, sums: Sequence[Sequence[Any]], cut: BackwardHalves
    ) -> tuple[tuple[Any, ...], Stash]:
        results, stashed = self._split(self.pair.vjp(residuals, sums))
        nbytes = cut.stash_bytes * (2 if any_dual(stashed) else 1)
        return results, Stash(stashed, nbytes, None)

    def _cut(self, traced: Traced, held: Any, counts: _Places) -> BackwardHalves:
        counts = tuple(map(addends_n, counts))
        key = (self.weights, counts)
        if (cut := traced.cuts.get(key)) is None:
            closed = None if traced.may_raise else _backward(traced, held, counts)
            cut = self._undivided()
            if closed is not None:
                cut = _cut(traced, closed, self.weights, tuple(map(len, held)))
            traced.cuts[key] = cut
        return cut


halves = lru_cache(maxsize=PAIRS_MAX)(Halves)


def _backward(traced: Traced, held: Any, counts: _Places) -> Any:
    """Return the inlined jaxpr of a backward; None if it cannot be cut."""
    closed = traced.backward.trace(*held, traced.addend_types(counts)).jaxpr
    sharded = any([not aval.sharding.mesh.empty for aval in closed.in_avals])
    if closed.effects or has_callback(closed) or sharded:
        return None
    return inlined(closed)


def _cut(
    traced: Traced, closed: Any, weights: Flags, sizes: Sequence[int]
) -> BackwardHalves:
    """Cut a jaxpr; `sizes` counts other residuals, kept arguments and kept outputs."""
    first, second, stash = cut_jaxpr(closed, weights)
    results = weights.count(False)
    number: dict[Any, int] = {}
    for index, atom in enumerate([*closed.jaxpr.invars, *first.outputs]):
        if variables([atom]):
            number.setdefault(atom, index)
    stashed = tuple([number[variable] for variable in stash])
    stash_index = {variable: index for index, variable in enumerate(stash)}
    handed = [
        None
        if any([output is late for late in second.outputs])
        else stash_index[output]
        for output in compress(closed.jaxpr.outvars, weights)
    ]
    # The first numbers of arguments, outputs, sums, results of I, other outputs of I.
    ends = [*accumulate(sizes), len(closed.jaxpr.invars)]
    ends.append(ends[-1] + results)
    places: list[list[int]] = [[] for _ in range(6)]
    nbytes = 0
    for variable, index in zip(stash, stashed, strict=True):
        section = bisect(ends, index)
        places[section].append(index - ends[section - 1])
        if section in (0, 3, 5):
            aval = variable.aval
            nbytes += intern_aval(aval.shape, aval.dtype, False).nbytes
    _, args, outputs, _, own_results, _ = places
    name = traced.name.rpartition(":")[2]
    compiled = _Compiled(
        first.jitted(closed, f"input_half_{name}"),
        tuple([number[variable] for variable in first.reads]),
        results,
        stashed,
        second.jitted(closed, f"weight_half_{name}"),
        tuple(handed),
    )
    return BackwardHalves(
        tuple([traced.args_kept[index] for index in args]),
        tuple([traced.outputs_kept[index] for index in outputs]),
        tuple(own_results),
        nbytes,
        compiled,
    )
