"""Collectives between the programs of `Cluster.run`.

Each member puts its arrays on its own worker, as values of the context of the run, and
sends a request to the main program, which waits in `Cluster.run`. Once all members of
a group have sent their requests, main moves and adds the values along the routes of
`jdag.collectives.routes`, and answers each member with refs on its worker.

All members of a group call the same collective and wait for each other; their results
have the same bits. Calls with the same `among` are matched in the order of each
member's calls, including calls that failed. If a member has ended, members disagree, or
groups wait for each other, each waiting member gets a `CollectiveError`. After the loss
of a worker all members get a `CollectiveError`.

Lifetimes: a request passes a member's values to main. Main holds these values until it
issues the collective. It holds the values of an answer until the member's next request,
or until the member ends.
"""

# ruff: noqa: D417 - the first argument is the `self` of a method of `Cluster`.

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jdag.collectives import replicas
from jdag.collectives.collective_matcher import (
    CollectiveCall,
    CollectiveMatcher,
    failure,
)
from jdag.collectives.routes import How
from jdag.compute.pytrees import flatten, flatten_refs, paths, unflatten
from jdag.compute.refs import RefData, is_ref
from jdag.context.context import Context
from jdag.context.refs import Hold, fetch
from jdag.context.tasks import Task
from jdag.engine.functions import call_site
from jdag.engine.protocol import Answered, Asked, Path, Return, Tell
from jdag.errors import CollectiveError, ContextError, JdagError, named_text, text_of

Among = Sequence[str] | None


def all_reduce(cluster: Any, tree: Any, among: Among = None, how: How = "owner") -> Any:
    """Return the sum of the pytrees of all members, the programs of a `cluster.run`.

    Args:
        tree: a pytree of arrays, numbers and refs, of the same structure and shapes in
            all members.
        among: the workers of the members, in the order of the sum; None: all workers
            of this `cluster.run`.
        how: "owner", "tree" or "ring"; see `jdag.collectives.routes`.

    Returns:
        The pytree of sums, which are arrays with the same bits as by `ctx.all_reduce`.

    Raises:
        CollectiveError: the call cannot be completed; the error names the cause, the
            waiting members and their call sites.
        ContextError: the caller is not a program of `cluster.run`.
    """
    return _call(cluster, "all_reduce", tree, among, how)


def all_gather(cluster: Any, tree: Any, among: Among = None, how: How = "owner") -> Any:
    """Return a tuple of all members' pytrees, in their order. See `all_reduce`."""
    return _call(cluster, "all_gather", tree, among, how)


def reduce_scatter(
    cluster: Any, shares: Any, among: Among = None, how: How = "owner"
) -> Any:
    """Return the sum of the shares that all members pass for this member.

    `shares` is a list with one pytree for each member, in order. See `all_reduce`.
    """
    return _call(cluster, "reduce_scatter", shares, among, how)


def all_to_all(cluster: Any, shares: Any, among: Among = None) -> Any:
    """Return a tuple of the shares that all members pass for this member, in order.

    Shares may differ in structure. See `reduce_scatter`.
    """
    return _call(cluster, "all_to_all", shares, among, "owner")


def broadcast(
    cluster: Any, tree: Any, root: str, among: Among = None, how: How = "owner"
) -> Any:
    """Return in all members the pytree of the member `root`. See `all_reduce`."""
    return _call(cluster, "broadcast", tree, among, how, root)


def barrier(cluster: Any, among: Among = None) -> None:
    """Wait until all members have called `barrier`. See `all_reduce`."""
    _call(cluster, "barrier", None, among, "owner")


def _call(
    cluster: Any, kind: str, tree: Any, among: Among, how: How, root: str | None = None
) -> Any:
    what, ctx = f"cluster.{kind}", cluster._context
    cluster._check(what)
    if ctx is None:
        raise ContextError(
            f"{what} in the main program: only programs that cluster.run runs may call "
            "collectives, together"
        )
    frame, site, data = ctx._frame, str(call_site()), None
    frame.check(what)
    try:
        workers = ctx.workers if among is None else among
        names = replicas.checked_workers(what, workers, how, frame.state.place)
    except JdagError as error:
        raise CollectiveError(str(error)) from None
    if kind != "barrier" and root in (None, ctx.here):
        data = _shared_data(ctx, what, tree)
    frame.tell_discarded()
    request = (kind, among and names, how, root, site, data)
    answer, failed = frame.wait(what, Asked, frame.id, frame.prefix, request)
    if failed is not None:
        raise frame.seen(failed)
    if isinstance(answer, str | JdagError):
        raise CollectiveError(str(answer))
    try:
        return fetch(frame.bound(answer, {}))[0]
    except JdagError as error:
        raise CollectiveError(f"{what}, called at {site}: {error}") from error


def _shared_data(ctx: Context, what: str, tree: Any) -> Any:
    """Put a pytree on this worker. Return refs as data; main frees the values."""
    leaves, treedef = flatten(fetch(tree), what=f"what {what} is given")
    for index, leaf in enumerate(leaves):
        if type(leaf) in (int, float, complex):  # Members' numbers may differ.
            leaves[index] = jnp.asarray(leaf, jnp.result_type(leaf))
    values = ctx.move(ctx.here, unflatten(treedef, leaves))
    refs = [leaf for leaf in flatten(values)[0] if is_ref(leaf)]
    if not refs:
        raise CollectiveError(f"{what} takes a pytree of arrays, not {tree!r}")
    for ref in refs:
        ref.hold.keep()
    return ctx._frame.unbound(values)


class Coordinator:
    """In the main program: matches and issues the collectives of one `Cluster.run`."""

    def __init__(self, ctx: Context, members: Sequence[str]) -> None:
        self._ctx, self._frame = ctx, ctx._frame
        self._matcher = CollectiveMatcher(members)
        self._paths: dict[str, Path] = {}  # The path of each member's program.
        self._held: dict[str, Any] = {}  # Keeps each member's last answer alive.

    def answer(self, task: Task, news: Return | Tell) -> None:
        name = task.worker
        self._held.pop(name, None)
        self._paths[name] = news.path
        if isinstance(news, Tell):
            answers = self._handle(name, news.data)
        else:
            failed = news.failure
            why = f"has failed: {failed.message}" if failed else "has returned"
            answers = self._matcher.ended(name, why.partition("\n")[0])
        for member, answer in answers.items():
            event = Answered(self._frame.id, self._paths[member], answer)
            self._frame.port.tell(event)

    def _handle(self, name: str, request: Any) -> dict[str, Any]:
        """Return each member's answer: an error's text, or a 1-tuple of a pytree."""
        if isinstance(request, JdagError):
            text = f"the main program cannot read the arguments of {name!r}: {request}"
            return {name: text}
        kind, among, how, root, site, data = request
        frame, calls = self._frame, dict[str, CollectiveCall]()
        refs = [leaf for leaf in flatten(data)[0] if type(leaf) is RefData]
        holds = {ref.key: Hold(frame.loose, ref.key, ref.owner) for ref in refs}
        tree = frame.bound(data, holds)
        call = CollectiveCall(f"cluster.{kind}, called at {site}", (), {}, tree)
        try:
            names = self._group(name, among, root)
            agreed = _agreed(tree, {"the call": kind, "how": how, "root": root})
            call = call._replace(among=names, agreed=agreed)
            calls, errors = self._matcher.arrive(name, call)
            results = self._issue(kind, calls, how, root) if calls else {}
        except Exception as error:  # Members wait for an answer, whatever failed.
            why = text_of(error) if isinstance(error, JdagError) else named_text(error)
            text = failure(calls or {name: call}, why)
            return dict.fromkeys(calls or (name,), text)
        self._held.update(results)
        answers = {member: (frame.unbound(tree),) for member, tree in results.items()}
        return {**errors, **answers}

    def _group(self, name: str, among: Any, root: str | None) -> tuple[str, ...]:
        members = self._matcher.members
        names = members if among is None else tuple(among)
        root = name if root is None else root
        checks = [(worker, "the members", names) for worker in (name, root)]
        checks += [(w, "programs of this cluster.run", members) for w in names]
        for worker, what, allowed in checks:
            if worker not in allowed:
                raise JdagError(f"{worker!r} is not among {what}: {list(allowed)}")
        return names

    def _issue(
        self, kind: str, calls: Mapping[str, CollectiveCall], how: How, root: str
    ) -> Mapping[str, Any]:
        ctx, check = self._ctx, self._frame.state.place
        trees = {member: call.given for member, call in calls.items()}
        if kind == "broadcast":
            copies = replicas.replicate(ctx, list(trees), trees[root], how, check)
            return dict(zip(trees, copies, strict=True))
        if kind == "barrier" or (kind == "all_reduce" and len(trees) == 1):
            return trees
        results: Mapping[str, Any] = getattr(replicas, kind)(ctx, trees, how, check)
        return results


def _agreed(tree: Any, agreed: dict[str, object]) -> dict[str, object]:
    if agreed["the call"] in ("all_reduce", "all_gather", "reduce_scatter"):
        refs, agreed["the structure"] = flatten_refs(tree, is_ref)
        for where, ref in zip(paths(tree, is_ref), refs, strict=True):
            agreed[where or "the array"] = ref.aval.strong
    return agreed
