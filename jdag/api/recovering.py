"""Lost workers: what a program asks for to have them, and what they held, again."""

from typing import Any

from jdag.api.outcome import nanoseconds
from jdag.api.recovery import Recovery
from jdag.engine.protocol import incarnated, incarnation_of, named
from jdag.errors import JdagError, JoinError, RecoveryError, WorkerLost, meant, unusable

TIMEOUT_S = 60.0


class Recoverable:
    """The part of a `Cluster` that is about lost workers."""

    def replicate_leaves(self, to: str | None = None) -> None:
        """Keep copies of all leaves and states of optimizers on peers from now on.

        `Cluster.recover` makes lost leaves again from these. What changes leaves
        (a step of an optimizer, `update`, `keep`, `make`, `run`) then waits until the
        copies of what it changed have arrived, and counts only then; if a worker is
        lost before, it raises WorkerLost, and after `recover` all leaves are as before
        it. Each leaf has its copies twice, on its own worker and on its peer, and while
        they are replaced once more. What is put or loaded later stays with the caller
        until it changes.

        Args:
            to: the worker that keeps the copies, but those of its own leaves. None,
                and for these: the next one in the order of workers; two neighbours
                lost at once lose leaves then.

        Raises:
            JdagError: there is no such worker, or the cluster was made without
                recover=True.
            WorkerLost: a worker is lost.
        """
        recovery = self._recovery("cluster.replicate_leaves")
        if to is not None:
            _check_name(recovery, "to", to)
        if len(recovery.workers) == 1:
            raise JdagError("cluster.replicate_leaves: there is no other worker")
        recovery.replicate(to)

    def recover(
        self,
        worker: str | None = None,
        to: str | None = None,
        timeout_s: float | None = TIMEOUT_S,
    ) -> None:
        """Wait for a lost worker to join again, and make again what it held.

        With `launch` its process is started anew. Leaves and states of optimizers, on
        all workers, get the values that they had when the last change counted, so all
        are of the same step: from the copies that `replicate_leaves` keeps, or from the
        caller those that were put and not changed since. Refs to them stay usable, and
        plans are made anew. What raised WorkerLost has not happened: repeat it.

            try:
                with cluster.context() as ctx:
                    ctx.backward(loss(ctx, batches[optimizer.steps]))
                    optimizer.step(ctx)
            except jdag.errors.WorkerLost:
                cluster.recover()

        Contexts in which the lost worker took part are over: their use raises
        WorkerLost. Objects of `cluster.host` are made anew by their factories, without
        what calls have changed in them. Not covered: the loss of the caller.

        Args:
            worker: which; None: all that are lost. If others are lost too, or are
                lost meanwhile, they are waited for as well.
            to: None, or another worker that takes its place: calls on it, its leaves
                and its objects are there from now on. Bits stay the same if nothing
                else of the program runs on that one, since what is summed there, and
                what is sent, depends on placement.
            timeout_s: how long to wait, in seconds of `cluster.now_ns`.

        Raises:
            RecoveryError: the worker is not lost, or has not joined in time; or there
                is no copy of a leaf: names it, and none is made again. Another
                `recover` may follow, after `load` or `drop` of that leaf.
            RemoteError: the factory of an object raised.
            JdagError: there is no such worker, or no room for one; or the cluster was
                made without recover=True.
        """
        recovery = self._recovery("cluster.recover")
        timeout_ns = nanoseconds(timeout_s)
        if worker is not None:
            _check_name(recovery, "worker", worker)
            if named(recovery.now[worker]) == recovery.here:
                raise JdagError(f"worker = {worker!r} is the caller's own, not lost")
        if to is not None:
            _check_name(recovery, "to", to)
            if worker is None or to == worker:
                said = (
                    f"to = {to!r}: allowed is another worker, in place of one that is"
                )
                raise JdagError(f"{said} named first; this is {worker!r}")
        due_ns = recovery.driver.now_ns + (timeout_ns or 1 << 53)
        _wait_for(recovery, worker, to, due_ns, f"timeout_s={timeout_s!r}")

    def _recovery(self, what: str) -> Recovery:
        cluster: Any = self
        cluster._check(what)
        recovery: Recovery | None = cluster._assignments.recovery
        if recovery is None:
            raise JdagError(
                f"{what}: ask for it where the cluster is made, by the main program: "
                "jdag.launch(..., recover=True), or simulate or connect"
            )
        return recovery


def _wait_for(
    recovery: Recovery, worker: str | None, to: str | None, due_ns: int, limit: str
) -> None:
    """Make again what lost workers held, once there are others in their places."""
    driver = recovery.driver

    def within_ns() -> int:
        left_ns: int = due_ns - driver.now_ns
        return max(left_ns, 0)

    def noticed() -> bool:
        pending = [*recovery.stale, *recovery.gone]
        return worker in pending if worker else bool(pending)

    if not driver.until(noticed, within_ns()):
        who = f"worker {worker!r} is not" if worker else "no worker is"
        raise RecoveryError(f"cluster.recover: {who} lost")
    while True:
        while gone := recovery.gone:  # Bounded by the time limit.
            if worker in gone and to is not None:
                if to in gone:
                    raise RecoveryError(f"to = {to!r} is lost as well")
                recovery.moved(worker, recovery.now[to])
            else:
                _rejoin(recovery, gone[0], within_ns(), limit)
        try:
            recovery.again()
            return
        except WorkerLost as error:
            if not driver.until(lambda: bool(recovery.gone), within_ns()):
                raise RecoveryError(f"not within {limit}: {error}") from error


def _rejoin(recovery: Recovery, worker: str, within_ns: int, limit: str) -> None:
    """Wait until the process of a lost worker has been replaced."""
    driver = recovery.driver
    former = recovery.now[worker]
    name = named(former)
    why = recovery.lost(worker)
    try:
        joined = driver.rejoined(name, incarnation_of(former), within_ns)
    except JoinError as error:  # It was lost again while it joined: once more.
        joined, why = within_ns > 0, str(error)
    if not joined:
        said = f"worker {name!r} has not joined again within {limit}"
        raise RecoveryError(f"{said}: {why}")
    if incarnation_of(former) == driver.incarnations.get(name, 0):
        return
    recovery.moved(worker, incarnated(name, driver.incarnations[name]))


def _check_name(recovery: Recovery, key: str, name: object) -> None:
    workers = recovery.workers
    if name not in workers:
        hint = meant(name, workers) if isinstance(name, str) else ""
        allowed = f"one of {', '.join(map(repr, workers))}{hint}"
        raise JdagError(unusable(key, name, allowed))
