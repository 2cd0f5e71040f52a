"""Collectives of a context: copies on several workers, and sums over workers.

Values are sent along routes (`jdag.collectives.routes`) by `ctx.call` and `ctx.move`.
Where a route branches, the graph has a call of `copies`, whose vjp adds the cotangents
of all copies in order. So the bits of a gradient depend on the route, never on the
order of arrival. Arrays with the same route share one call and one transfer.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jdag.collectives.parts import added, copies, divided, joined
from jdag.collectives.routes import (
    How,
    Route,
    check_how,
    route_of,
    routes_among,
    routes_from,
    routes_up,
)
from jdag.compute.pytrees import flatten_refs, paths, static, unflatten
from jdag.compute.refs import is_ref
from jdag.engine.functions import call_site
from jdag.errors import JdagError, kind_of

_Ref = Any  # A `jdag.Ref`.

# ------------------------------------------------------------------------- arguments


# check(worker, caller) raises JdagError if the worker or device is unknown.
Check = Callable[[object, str], object]


def checked_workers(
    what: str, workers: Any, how: object, check: Check
) -> tuple[str, ...]:
    check_how(how)
    if isinstance(workers, str):
        raise JdagError(
            f"{what} takes a list of workers: expected [{workers!r}], not {workers!r}"
        )
    if isinstance(workers, set | frozenset):
        raise JdagError(
            f"{what} takes workers in the order of sums: expected a list such as "
            f"{sorted(map(str, workers))!r}, not {kind_of(workers)}"
        )
    try:
        names = tuple(workers)
    except TypeError:
        raise JdagError(
            f"{what} takes the names of workers, not {kind_of(workers)}"
        ) from None
    if not names:
        raise JdagError(f"{what} takes at least one worker, not {workers!r}")
    for index, name in enumerate(names):
        if name in names[:index]:
            raise JdagError(
                f"{what} takes each worker once, but {name!r} occurs twice in "
                f"{list(names)!r}; two devices of a worker are allowed: 'ps0/cpu:0'"
            )
    for name in names:
        check(name, what)
    return names


def checked_trees(what: str, trees: Any, how: object, check: Check) -> tuple[str, ...]:
    if not isinstance(trees, Mapping):
        raise JdagError(
            f"{what} takes a mapping from names of workers to pytrees, as in "
            f"{{'ps0': refs, 'ps1': refs}}, not {kind_of(trees)}"
        )
    return checked_workers(what, tuple(trees), how, check)


def shares_of(what: str, trees: Any, how: object, check: Check) -> list[dict[str, Any]]:
    """For each receiver in order, return the shares that all workers send to it."""
    workers = checked_trees(what, trees, how, check)
    for name in workers:
        shares = trees[name]
        is_list = isinstance(shares, list | tuple)
        if not is_list or len(shares) != len(workers):
            raise JdagError(
                f"{what} takes for each worker a list of {len(workers)} pytrees, one "
                f"for each worker in order; {name!r} has "
                f"{len(shares) if is_list else kind_of(shares)}"
            )
    return [{name: trees[name][to] for name in workers} for to in range(len(workers))]


def refs_of(what: str, tree: Any) -> tuple[list[_Ref], Any]:
    refs, form = flatten_refs(tree, is_ref)
    if not refs:
        raise JdagError(f"{what} takes a pytree of refs, but {tree!r} has no refs")
    return refs, form


def equals_of(
    what: str, trees: Mapping[str, Any]
) -> tuple[list[list[_Ref]], list[Any]]:
    """Return each pytree's refs and form. Raise if structures or types differ."""
    (first, tree), *rest = trees.items()
    refs, form = refs_of(what, tree)
    names = paths(tree, is_ref)
    for ref, path in zip(refs, names, strict=True):
        if not jnp.issubdtype(ref.dtype, jnp.number):
            raise JdagError(
                f"{what} adds numbers, and {path or 'the ref'} of {first!r} is "
                f"{ref.aval}"
            )
    lists, forms = [refs], [form]
    for worker, tree in rest:
        others, structure = refs_of(what, tree)
        if structure != form:
            raise JdagError(
                f"{what} takes pytrees of equal structure: the one of {first!r} is "
                f"{form}, but the one of {worker!r} is {structure}"
            )
        for expected, ref, path in zip(refs, others, names, strict=True):
            if (expected.shape, expected.dtype) != (ref.shape, ref.dtype):
                raise JdagError(
                    f"{what} takes arrays of equal shape and dtype: "
                    f"{path or 'the array'} of {first!r} is {expected.aval}, "
                    f"but of {worker!r} it is {ref.aval}"
                )
        lists.append(others)
        forms.append(structure)
    if not rest:
        text = f"{what} of {first!r} alone has no effect: the sum is the pytree itself"
        site = call_site()
        warnings.warn_explicit(text, UserWarning, site.file, site.line)
    return lists, forms


# ------------------------------------------------------------------- over the routes


def replicate(
    ctx: Any, workers: Sequence[str], tree: Any, how: How, check: Check
) -> tuple[Any, ...]:
    workers = checked_workers("ctx.replicate", workers, how, check)
    refs, form = refs_of("ctx.replicate", tree)
    results: list[list[Any]] = [[None] * len(refs) for _ in workers]
    for group in _groups((ref.place, ref.tracked) for ref in refs):
        grouped = [refs[index] for index in group]
        source = grouped[0].place
        root = workers.index(source) if source in workers else None
        routes = routes_from(root, len(workers), how)
        parts = _divided(ctx, source, grouped, len(routes))
        copies_by_route = [
            _distributed(ctx, source, part, route, workers)
            for part, route in zip(parts, routes, strict=True)
        ]
        _gather(ctx, workers, group, copies_by_route, results, grouped)
    return tuple([unflatten(form, each) for each in results])


def all_reduce(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, Any]:
    workers = checked_trees("ctx.all_reduce", trees, how, check)
    lists, forms = equals_of("ctx.all_reduce", trees)
    ups, downs = routes_up(len(workers), how), routes_among(len(workers), how)
    results: list[list[Any]] = [[None] * len(lists[0]) for _ in workers]
    tracked = [any(ref.tracked for ref in refs) for refs in zip(*lists, strict=True)]
    for group in _groups(tracked):
        grouped = [[refs[index] for index in group] for refs in lists]
        parts = [
            _divided(ctx, worker, refs, len(ups))
            for worker, refs in zip(workers, grouped, strict=True)
        ]
        copies_by_route = []
        for addends, up, down in zip(zip(*parts, strict=True), ups, downs, strict=True):
            root = workers[up.order[0]]
            total = _summed(ctx, addends, up, workers)
            copies_by_route.append(_distributed(ctx, root, total, down, workers))
        _gather(ctx, workers, group, copies_by_route, results, grouped[0])
    return {
        worker: unflatten(form, refs)
        for worker, form, refs in zip(workers, forms, results, strict=True)
    }


def all_gather(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, tuple[Any, ...]]:
    """For each worker, return copies of the pytrees of all workers, in order."""
    workers = checked_trees("ctx.all_gather", trees, how, check)
    gathered = []
    for number, worker in enumerate(workers):
        refs, form = refs_of("ctx.all_gather", trees[worker])
        results: list[list[Any]] = [[None] * len(refs) for _ in workers]
        route = route_of(number, len(workers), how, 1)
        for group in _groups([ref.tracked for ref in refs]):
            grouped = [refs[index] for index in group]
            copied = _distributed(ctx, worker, grouped, route, workers)
            _gather(ctx, workers, group, [copied], results, grouped)
        gathered.append([unflatten(form, each) for each in results])
    return dict(zip(workers, zip(*gathered, strict=True), strict=True))


def reduce_scatter(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, Any]:
    sums = {}
    by_receiver = shares_of("ctx.reduce_scatter", trees, how, check)
    workers = tuple(trees)
    for to, shares in enumerate(by_receiver):
        lists, forms = equals_of("ctx.reduce_scatter", shares)
        route = route_of(to, len(workers), how, -1)
        result: list[Any] = [None] * len(lists[0])
        columns = zip(*lists, strict=True)
        for group in _groups(any(ref.tracked for ref in refs) for refs in columns):
            addends = [[refs[index] for index in group] for refs in lists]
            total = _summed(ctx, addends, route, workers)
            for index, ref in zip(group, total, strict=True):
                result[index] = ref
        sums[workers[to]] = unflatten(forms[to], result)
    return sums


def all_to_all(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, Any]:
    """For each worker, return the shares sent to it. Sending takes n - 1 rounds."""
    shares, workers = shares_of("ctx.all_to_all", trees, how, check), tuple(trees)
    received: list[list[Any]] = [[None] * len(workers) for _ in workers]
    for step in range(len(workers)):
        for number, name in enumerate(workers):
            to = (number + step) % len(workers)
            received[to][number] = ctx.move(workers[to], shares[to][name])
    return dict(zip(workers, map(tuple, received), strict=True))


def _groups(kinds: Iterable[Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


def _divided(ctx: Any, worker: str, refs: list[_Ref], count: int) -> list[Any]:
    if count == 1:
        return [refs]
    return list(ctx.call(worker, divided, static(count), *refs))


def _distributed(
    ctx: Any, source: str, refs: Sequence[_Ref], route: Route, workers: Sequence[str]
) -> list[Sequence[_Ref]]:
    result: list[Any] = [None] * len(workers)
    first = route.children(None)
    waiting = dict(zip(first, _copied(ctx, source, refs, len(first)), strict=True))
    for replica in route.order:
        children, received = route.children(replica), waiting.pop(replica)
        copied = _copied(ctx, workers[replica], received, 1 + len(children))
        result[replica] = copied[0]
        waiting.update(zip(children, copied[1:], strict=True))
    return result


def _copied(
    ctx: Any, worker: str, refs: Sequence[_Ref], count: int
) -> Sequence[Sequence[_Ref]]:
    if count > 1 and refs[0].tracked:
        copied: Sequence[Sequence[_Ref]]
        copied = ctx.call(worker, copies, static(count), *refs)
        return copied
    if any(ref.place != worker for ref in refs):
        refs = ctx.move(worker, tuple(refs))
    return [refs] * count


def _summed(
    ctx: Any, addends: Sequence[Sequence[_Ref]], route: Route, workers: Sequence[str]
) -> Sequence[_Ref]:
    """Sum refs towards the root. A replica adds its refs, then its children's sums."""
    sums: dict[int, Sequence[_Ref]] = {}
    for replica in reversed(route.order):
        children = route.children(replica)
        lists = [addends[replica], *(sums.pop(child) for child in children)]
        refs = [ref for each in lists for ref in each]
        if len(lists) > 1:
            refs = ctx.call(workers[replica], added, static(len(lists)), *refs)
        sums[replica] = refs
    return sums[route.order[0]]


def _gather(
    ctx: Any,
    workers: Sequence[str],
    group: Sequence[int],
    copies_by_route: Sequence[Sequence[Sequence[_Ref]]],
    results: list[list[Any]],
    sources: Sequence[_Ref],
) -> None:
    """Join each replica's parts, and store them in `results` at indices `group`."""
    for replica, worker in enumerate(workers):
        parts = [by_replica[replica] for by_replica in copies_by_route]
        refs = parts[0]
        if len(parts) > 1:
            vectors = [vector for part in parts for vector in part]
            # For each array, the index of its dtype, and its shape.
            dtypes = list(dict.fromkeys(ref.dtype for ref in sources))
            form = tuple([(dtypes.index(ref.dtype), ref.shape) for ref in sources])
            refs = ctx.call(worker, joined, static(form), *vectors)
        for index, ref in zip(group, refs, strict=True):
            results[replica][index] = ref
