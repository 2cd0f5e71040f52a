"""Collectives between the programs of `Cluster.run`.

A program puts its arrays on its own worker, as values of the run's context, and asks
the main program, which waits in `Cluster.run` and knows which programs have ended. When
all members of a group have asked, main moves and adds their values along the routes of
`jdag.context.context_collectives`, and answers each member with refs on its worker.

Lifetimes: asking hands a member's values to main. Main holds them until the collective
is issued, and those of an answer until the same member asks again or ends.
"""

from collections.abc import Callable, Mapping, Sequence
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
from jdag.errors import (
    CollectiveError,
    ContextError,
    JdagError,
    named_text,
    text_of,
)

Among = Sequence[str] | None


class Collectives:
    """The part of `Cluster` that programs of `Cluster.run` call together.

    All members call the same and wait until all have; their results have the same bits.
    Those of one `among` belong together in the order of each member's calls, those that
    failed included. If a member has ended, members disagree, or programs wait for each
    other, each that waits gets a `CollectiveError`; so do all once a worker is lost.
    """

    _context: Context | None  # In which `run` runs its program.
    _check: Callable[[str], None]

    def all_reduce(self, tree: Any, among: Among = None, how: How = "owner") -> Any:
        """Return the sum of the pytrees of all members.

        Args:
            tree: a pytree of arrays, numbers and refs; equal in structure and shapes.
            among: the workers of the members, in the order of the sum; by default all
                of this `cluster.run`.
            how: "owner", "tree" or "ring"; see `jdag.collectives.routes`.

        Returns:
            The pytree with arrays: the bits of `ctx.all_reduce`.

        Raises:
            CollectiveError: it cannot be completed; the text says why, and names the
                members that wait and their lines.
            ContextError: this is no program that `cluster.run` runs.
        """
        return self._together("all_reduce", tree, among, how)

    def all_gather(self, tree: Any, among: Among = None, how: How = "owner") -> Any:
        """Return a tuple of the members' pytrees, in order; see `all_reduce`."""
        return self._together("all_gather", tree, among, how)

    def reduce_scatter(
        self, shares: Any, among: Among = None, how: How = "owner"
    ) -> Any:
        """Return the sum of the shares that all members have for this one.

        `shares` is a list of pytrees, one for each member, in order; see `all_reduce`.
        """
        return self._together("reduce_scatter", shares, among, how)

    def all_to_all(self, shares: Any, among: Among = None) -> Any:
        """Return a tuple of the shares that all members have for this one, in order.

        Shares need not be equal; see `reduce_scatter`.
        """
        return self._together("all_to_all", shares, among, "owner")

    def broadcast(
        self, tree: Any, root: str, among: Among = None, how: How = "owner"
    ) -> Any:
        """Return the pytree of the member `root`, for all; see `all_reduce`."""
        return self._together("broadcast", tree, among, how, root)

    def barrier(self, among: Among = None) -> None:
        """Wait until all members have called this; see `all_reduce`."""
        self._together("barrier", None, among, "owner")

    def _together(
        self, kind: str, tree: Any, among: Among, how: How, root: str | None = None
    ) -> Any:
        what, ctx = f"cluster.{kind}", self._context
        self._check(what)
        if ctx is None:
            said = "programs that cluster.run runs at the same time call it together"
            raise ContextError(f"{what} in the main program: {said}")
        frame, site, data = ctx._frame, str(call_site()), None
        frame.check(what)
        try:
            given = ctx.workers if among is None else among
            names = replicas.checked_workers(what, given, how, frame.state.place)
        except JdagError as error:
            raise CollectiveError(str(error)) from None
        if kind != "barrier" and root in (None, ctx.here):
            data = _handed_over(ctx, what, tree)
        frame.tell_discarded()
        asked = (kind, among and names, how, root, site, data)
        answer, failed = frame.wait(what, Asked, frame.id, frame.prefix, asked)
        if failed is not None:
            raise frame.seen(failed)
        if isinstance(answer, str | JdagError):
            raise CollectiveError(str(answer))
        try:
            return fetch(frame.bound(answer, {}))[0]
        except JdagError as error:
            raise CollectiveError(f"{what}, called at {site}: {error}") from error


def _handed_over(ctx: Context, what: str, tree: Any) -> Any:
    """Return a pytree as data of values on this worker, which main owns from now on."""
    leaves, treedef = flatten(fetch(tree), what=f"what {what} is given")
    for index, leaf in enumerate(leaves):
        if type(leaf) in (int, float, complex):  # They differ between members.
            leaves[index] = jnp.asarray(leaf, jnp.result_type(leaf))
    there = ctx.move(ctx.here, unflatten(treedef, leaves))
    refs = [leaf for leaf in flatten(there)[0] if is_ref(leaf)]
    if not refs:
        raise CollectiveError(f"{what} takes a pytree of arrays; it got {tree!r}")
    for ref in refs:
        ref.hold.keep()
    return ctx._frame.unbound(there)


class Coordinator:
    """Answers the programs of one `Cluster.run`, in the frame that runs them."""

    def __init__(self, ctx: Context, members: Sequence[str]) -> None:
        self._ctx, self._frame = ctx, ctx._frame
        self._rendezvous = CollectiveMatcher(members)
        self._paths: dict[str, Path] = {}  # Of the members' programs.
        self._held: dict[str, Any] = {}  # The last answer to each.

    def answer(self, task: Task, news: Return | Tell) -> None:
        """Take the end of a program, or what it asks; answer those that can go on."""
        name = task.worker
        self._held.pop(name, None)
        self._paths[name] = news.path
        if isinstance(news, Tell):
            answers = self._asked(name, news.data)
        else:
            failed = news.failure
            why = f"has failed: {failed.message}" if failed else "has returned"
            answers = self._rendezvous.ended(name, why.partition("\n")[0])
        for member, answer in answers.items():
            told = Answered(self._frame.id, self._paths[member], answer)
            self._frame.port.tell(told)

    def _asked(self, name: str, asked: Any) -> dict[str, Any]:
        """Return answers to members: the text of an error, or (its pytree,)."""
        if isinstance(asked, JdagError):
            return {name: f"the main program cannot read what {name!r} gives: {asked}"}
        kind, among, how, root, site, data = asked
        frame, calls = self._frame, dict[str, CollectiveCall]()
        kept = [leaf for leaf in flatten(data)[0] if type(leaf) is RefData]
        holds = {one.key: Hold(frame.loose, one.key, one.owner) for one in kept}
        tree = frame.bound(data, holds)
        call = CollectiveCall(f"cluster.{kind}, called at {site}", (), {}, tree)
        try:
            names = self._group(name, among, root)
            agreed = _agreed(tree, {"the call": kind, "how": how, "root": root})
            call = call._replace(among=names, agreed=agreed)
            calls, answers = self._rendezvous.arrive(name, call)
            found = self._issued(kind, calls, how, root) if calls else {}
        except Exception as error:  # Members wait, whatever went wrong.
            why = text_of(error) if isinstance(error, JdagError) else named_text(error)
            text = failure(calls or {name: call}, why)
            return dict.fromkeys(calls or (name,), text)
        self._held.update(found)
        return {**answers, **{one: (frame.unbound(it),) for one, it in found.items()}}

    def _group(self, name: str, among: Any, root: str | None) -> tuple[str, ...]:
        members = self._rendezvous.members
        names = members if among is None else tuple(among)
        root = name if root is None else root
        wanted = [(one, "the members", names) for one in (name, root)]
        wanted += [(one, "programs of this cluster.run", members) for one in names]
        for one, what, there in wanted:
            if one not in there:
                raise JdagError(f"{one!r} is not among {what}: {list(there)}")
        return names

    def _issued(
        self, kind: str, calls: Mapping[str, CollectiveCall], how: How, root: str
    ) -> Mapping[str, Any]:
        ctx, check = self._ctx, self._frame.state.place
        trees = {member: call.given for member, call in calls.items()}
        if kind == "broadcast":
            copies = replicas.replicate(ctx, list(trees), trees[root], how, check)
            return dict(zip(trees, copies, strict=True))
        if kind == "barrier" or (kind == "all_reduce" and len(trees) == 1):
            return trees
        found: Mapping[str, Any] = getattr(replicas, kind)(ctx, trees, how, check)
        return found


def _agreed(tree: Any, agreed: dict[str, object]) -> dict[str, object]:
    if agreed["the call"] in ("all_reduce", "all_gather", "reduce_scatter"):
        refs, agreed["the structure"] = flatten_refs(tree, is_ref)
        for where, ref in zip(paths(tree, is_ref), refs, strict=True):
            agreed[where or "the array"] = ref.aval.strong
    return agreed
