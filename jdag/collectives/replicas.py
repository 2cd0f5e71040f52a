"""Replicas over workers: broadcast of refs, and sums over workers.

Values travel along routes (`jdag.collectives.routes`) by `ctx.call` and `ctx.move`
only. Where a route branches, the graph has a call of `copies`, whose vjp adds the
cotangents of all copies in order. So the bits of a gradient depend on the route, never
on order of arrival. Arrays with the same route share one call and one transfer.
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


# check(worker, caller) raises JdagError if there is no such worker or device.
Check = Callable[[object, str], object]


def checked_workers(
    what: str, workers: Any, how: object, check: Check
) -> tuple[str, ...]:
    """Check the workers of replicas; return them in order."""
    check_how(how)
    if isinstance(workers, str):
        raise JdagError(f"{what} takes several workers: [{workers!r}], not {workers!r}")
    if isinstance(workers, set | frozenset):
        raise JdagError(
            f"{what} takes workers in an order, which is that of the sum of their "
            f"gradients: a list such as {sorted(map(str, workers))!r}, not "
            f"{kind_of(workers)}"
        )
    try:
        names = tuple(workers)
    except TypeError:
        raise JdagError(
            f"{what} takes the names of workers, not {kind_of(workers)}"
        ) from None
    if not names:
        raise JdagError(f"{what} takes one worker or more, and got {workers!r}")
    for index, name in enumerate(names):
        if name in names[:index]:
            raise JdagError(
                f"{what} takes each worker once, and {name!r} is among {list(names)!r} "
                "twice; two devices of one worker are two places: 'ps0/cpu:0'"
            )
    for name in names:
        check(name, what)
    return names


def workers_of(what: str, trees: Any) -> tuple[Any, ...]:
    """Return the workers of these pytrees."""
    if not isinstance(trees, Mapping):
        raise JdagError(
            f"{what} takes the pytree of each worker by its name, as in "
            f"{{'ps0': refs, 'ps1': refs}}, not {kind_of(trees)}"
        )
    return tuple(trees)


def checked_trees(what: str, trees: Any, how: object, check: Check) -> tuple[str, ...]:
    """Check the workers of these pytrees; return them in order."""
    return checked_workers(what, workers_of(what, trees), how, check)


def shares_of(what: str, trees: Any, how: object, check: Check) -> list[dict[str, Any]]:
    """Return, for each worker, the shares that all have for it; check how many."""
    workers = checked_trees(what, trees, how, check)
    for name in workers:
        few = trees[name]
        if not isinstance(few, list | tuple) or len(few) != len(workers):
            said = len(few) if isinstance(few, list | tuple) else kind_of(few)
            raise JdagError(
                f"{what} takes of each worker a list of {len(workers)} pytrees, one "
                f"for each worker in order, and of {name!r} it got {said}"
            )
    return [{name: trees[name][to] for name in workers} for to in range(len(workers))]


def refs_of(what: str, tree: Any) -> tuple[list[_Ref], Any]:
    """Return the refs of a pytree, and its form."""
    refs, form = flatten_refs(tree, is_ref)
    if not refs:
        raise JdagError(f"{what} takes a pytree of refs, and there is none in {tree!r}")
    return refs, form


def equals_of(
    what: str, trees: Mapping[str, Any]
) -> tuple[list[list[_Ref]], list[Any]]:
    """Return of each worker's pytree the refs, and its form; they are equal."""
    (first, tree), *others = trees.items()
    refs, form = refs_of(what, tree)
    names = paths(tree, is_ref)
    for ref, path in zip(refs, names, strict=True):
        if not jnp.issubdtype(ref.dtype, jnp.number):
            raise JdagError(
                f"{what} adds numbers, and {path or 'the ref'} of {first!r} is "
                f"{ref.aval}"
            )
    found, forms = [refs], [form]
    for worker, other in others:
        theirs, structure = refs_of(what, other)
        if structure != form:
            raise JdagError(
                f"{what} takes equal pytrees: that of {first!r} is {form}, that of "
                f"{worker!r} {structure}"
            )
        for one, ref, path in zip(refs, theirs, names, strict=True):
            if (one.shape, one.dtype) != (ref.shape, ref.dtype):
                raise JdagError(
                    f"{what} takes equal arrays: {path or 'that'} of {first!r} is "
                    f"{one.aval}, of {worker!r} {ref.aval}"
                )
        found.append(theirs)
        forms.append(structure)
    if not others:
        said = f"{what} of {first!r} alone: the sum of one is itself"
        site = call_site()
        warnings.warn_explicit(said, UserWarning, site.file, site.line)
    return found, forms


# ------------------------------------------------------------------- over the routes


def replicate(
    ctx: Any, workers: Sequence[str], tree: Any, how: How, check: Check
) -> tuple[Any, ...]:
    """Copy a pytree to each worker; see `jdag.Context.replicate`."""
    workers = checked_workers("ctx.replicate", workers, how, check)
    refs, form = refs_of("ctx.replicate", tree)
    found: list[list[Any]] = [[None] * len(refs) for _ in workers]
    for group in _groups((ref.place, ref.tracked) for ref in refs):
        some = [refs[number] for number in group]
        source = some[0].place
        there = workers.index(source) if source in workers else None
        routes = routes_from(there, len(workers), how)
        parts = _divided(ctx, source, some, len(routes))
        sent = [
            _handed_on(ctx, source, part, route, workers)
            for part, route in zip(parts, routes, strict=True)
        ]
        _gather(ctx, workers, group, sent, found, some)
    return tuple([unflatten(form, each) for each in found])


def all_reduce(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, Any]:
    """Return the sum of all pytrees for each worker; see `jdag.Context.all_reduce`."""
    workers = checked_trees("ctx.all_reduce", trees, how, check)
    lists, forms = equals_of("ctx.all_reduce", trees)
    ups, downs = routes_up(len(workers), how), routes_among(len(workers), how)
    found: list[list[Any]] = [[None] * len(lists[0]) for _ in workers]
    tracked = [any(ref.tracked for ref in refs) for refs in zip(*lists, strict=True)]
    for group in _groups(tracked):
        some = [[refs[number] for number in group] for refs in lists]
        parts = [
            _divided(ctx, worker, refs, len(ups))
            for worker, refs in zip(workers, some, strict=True)
        ]
        sent = []
        for own, up, down in zip(zip(*parts, strict=True), ups, downs, strict=True):
            root = workers[up.order[0]]
            total = _summed(ctx, own, up, workers)
            sent.append(_handed_on(ctx, root, total, down, workers))
        _gather(ctx, workers, group, sent, found, some[0])
    return {
        worker: unflatten(form, refs)
        for worker, form, refs in zip(workers, forms, found, strict=True)
    }


def all_gather(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, tuple[Any, ...]]:
    """Return the pytrees of all workers, in order, for each of them."""
    workers = checked_trees("ctx.all_gather", trees, how, check)
    gathered = []
    for number, worker in enumerate(workers):
        refs, form = refs_of("ctx.all_gather", trees[worker])
        found: list[list[Any]] = [[None] * len(refs) for _ in workers]
        route = route_of(number, len(workers), how, 1)
        for group in _groups([ref.tracked for ref in refs]):
            some = [refs[index] for index in group]
            sent = _handed_on(ctx, worker, some, route, workers)
            _gather(ctx, workers, group, [sent], found, some)
        gathered.append([unflatten(form, each) for each in found])
    return dict(zip(workers, zip(*gathered, strict=True), strict=True))


def reduce_scatter(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, Any]:
    """Return, for each worker, the sum of its shares."""
    summed = {}
    several, workers = shares_of("ctx.reduce_scatter", trees, how, check), tuple(trees)
    for to, shares in enumerate(several):
        lists, forms = equals_of("ctx.reduce_scatter", shares)
        route = route_of(to, len(workers), how, -1)
        found: list[Any] = [None] * len(lists[0])
        tracked = [any(one.tracked for one in few) for few in zip(*lists, strict=True)]
        for group in _groups(tracked):
            own = [[refs[number] for number in group] for refs in lists]
            total = _summed(ctx, own, route, workers)
            for number, ref in zip(group, total, strict=True):
                found[number] = ref
        summed[workers[to]] = unflatten(forms[to], found)
    return summed


def all_to_all(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, Any]:
    """Return, for each worker, a tuple of its shares, sent in n - 1 rounds."""
    shares, workers = shares_of("ctx.all_to_all", trees, how, check), tuple(trees)
    found: list[list[Any]] = [[None] * len(workers) for _ in workers]
    for step in range(len(workers)):
        for number, name in enumerate(workers):
            to = (number + step) % len(workers)
            found[to][number] = ctx.move(workers[to], shares[to][name])
    return dict(zip(workers, map(tuple, found), strict=True))


def _groups(kinds: Iterable[Any]) -> list[list[int]]:
    found: dict[Any, list[int]] = {}
    for number, kind in enumerate(kinds):
        found.setdefault(kind, []).append(number)
    return list(found.values())


def _divided(ctx: Any, worker: str, refs: list[_Ref], count: int) -> list[Any]:
    if count == 1:
        return [refs]
    return list(ctx.call(worker, divided, static(count), *refs))


def _handed_on(
    ctx: Any, source: str, refs: Sequence[_Ref], route: Route, workers: Sequence[str]
) -> list[Sequence[_Ref]]:
    """Send refs along a route; return the copies of each replica."""
    found: list[Any] = [None] * len(workers)
    first = route.children(None)
    waiting = dict(zip(first, _split(ctx, source, refs, len(first)), strict=True))
    for replica in route.order:
        children = route.children(replica)
        given = waiting.pop(replica)
        own, *more = _split(ctx, workers[replica], given, 1 + len(children))
        found[replica] = own
        waiting.update(zip(children, more, strict=True))
    return found


def _split(
    ctx: Any, worker: str, refs: Sequence[_Ref], count: int
) -> Sequence[Sequence[_Ref]]:
    if count > 1 and refs[0].tracked:
        found: Sequence[Sequence[_Ref]]
        found = ctx.call(worker, copies, static(count), *refs)
        return found
    if any(ref.place != worker for ref in refs):
        refs = ctx.move(worker, tuple(refs))
    return [refs] * count


def _summed(
    ctx: Any, own: Sequence[Sequence[_Ref]], route: Route, workers: Sequence[str]
) -> Sequence[_Ref]:
    """Sum refs towards the root; a replica adds its own before its children's."""
    sums: dict[int, Sequence[_Ref]] = {}
    for replica in reversed(route.order):
        lists = [own[replica], *(sums.pop(one) for one in route.children(replica))]
        refs = [ref for each in lists for ref in each]
        if len(lists) > 1:
            refs = ctx.call(workers[replica], added, static(len(lists)), *refs)
        sums[replica] = refs
    return sums[route.order[0]]


def _gather(
    ctx: Any,
    workers: Sequence[str],
    group: Sequence[int],
    sent: Sequence[Sequence[Sequence[_Ref]]],
    found: list[list[Any]],
    some: Sequence[_Ref],
) -> None:
    for replica, worker in enumerate(workers):
        parts = [of_route[replica] for of_route in sent]
        refs = parts[0]
        if len(parts) > 1:
            vectors = [vector for part in parts for vector in part]
            # For each array, the index of its dtype and its shape.
            kinds = list(dict.fromkeys(ref.dtype for ref in some))
            form = tuple([(kinds.index(ref.dtype), ref.shape) for ref in some])
            refs = ctx.call(worker, joined, static(form), *vectors)
        for number, ref in zip(group, refs, strict=True):
            found[replica][number] = ref
