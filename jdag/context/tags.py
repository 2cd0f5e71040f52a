"""Marks on calls: which stage of which micro-batch they are.

Inputs:  numbers of stage and micro-batch; the schedule of the cluster, if there is one.
Outputs: the tag of each call that is made under them; whether a plan can follow.
Invariants: under a schedule, a program calls each stage of each micro-batch once, on
    the worker that has the stage. What several micro-batches read, such as weights of
    another worker's, comes by a transfer of its own: one transfer brings back all its
    cotangents at once, so a micro-batch's backward would wait there for the others'.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from jdag.compute.cutting import CutPlan
from jdag.compute.pytrees import Split
from jdag.compute.refs import is_ref
from jdag.engine.functions import name_of, transferred
from jdag.engine.names import U32_MAX
from jdag.engine.protocol import Tag, named
from jdag.errors import ScheduleError, unusable
from jdag.schedules import Schedule
from jdag.schedules.actions import Action

Tagged = AbstractContextManager[None]


@contextmanager
def tagged(frame: Any, stage: int, micro_batch: int) -> Iterator[None]:
    """Have the calls of a frame marked; see `Context.tag`."""
    schedule: Schedule | None = frame.state.schedule
    stages = U32_MAX if schedule is None else schedule.stages
    micro_batches = U32_MAX if schedule is None else schedule.micro_batches
    for key, value, count in (
        ("stage", stage, stages),
        ("micro_batch", micro_batch, micro_batches),
    ):
        if type(value) is not int or not 0 <= value < count:
            of = "" if schedule is None else ", as in the schedule"
            allowed = f"an integer from 0 to {count - 1}{of}"
            raise ScheduleError(unusable(f"ctx.tag: {key}", value, allowed))
    halves = schedule is not None and schedule.halves(stage, micro_batch)
    tag = Tag(stage, micro_batch, schedule is not None, halves)
    before, frame.tag = frame.tag, tag
    try:
        yield
    finally:
        frame.tag = before


def move_shared(
    frame: Any, move: Callable[..., Any], worker: str, fn: Any, parts: Split
) -> None:
    """Move first what a listed call shares with those of other micro-batches.

    That is what is tracked, on another worker, and no result of this micro-batch.
    """
    tag: Tag | None = frame.tag
    if fn is transferred or tag is None or not tag.listed or frame.state.recording:
        return  # Plans send each value by itself.
    found = {
        (ref.key, worker): ref
        for _, ref in parts.refs
        if is_ref(ref)
        and (ref.tracked and ref.owner != worker)
        and frame.batches.get(ref.key.name) != tag.micro_batch
        and (ref.key, worker) not in frame.apart
    }
    if found:
        frame.apart.update(dict.fromkeys(found))
        move(named(worker), list(found.values()))


def tag_of(frame: Any, worker: str, device: str | None, fn: Any) -> Tag | None:
    """Return the tag of a call; that of a move is none.

    Raises:
        ScheduleError: the stage is on another worker, or this call is its second one.
    """
    tag: Tag = frame.tag
    if fn is transferred:
        return None
    if not tag.listed:
        return tag
    stage, schedule = tag.stage, frame.state.schedule
    where = named(worker) if device is None else f"{named(worker)}/{device}"
    if where != schedule.worker(stage):
        raise ScheduleError(
            f"{name_of(fn)} is called on {where!r} as stage {stage}, which the "
            f"schedule has on {schedule.worker(stage)!r}"
        )
    forward = Action("F", stage, tag.micro_batch)
    if forward in frame.acted:
        raise ScheduleError(
            f"{name_of(fn)} is a second call of stage {stage} and micro-batch "
            f"{tag.micro_batch}, after {frame.acted[forward]}: under a schedule a "
            "context holds one run of a pipeline: make another run in another context, "
            "`with cluster.context() as other:`. Of two functions of a stage make one, "
            "or call one outside of ctx.tag"
        )
    frame.acted[forward] = name_of(fn)
    frame.batches[(*frame.prefix, frame.calls + 1)] = tag.micro_batch
    return tag


def check_steps(program: str, schedule: Schedule | None, cut: CutPlan) -> None:
    """Raise ScheduleError if a step of a plan would wait for a list for ever."""
    pieces = [piece.segment for piece in cut.pieces]
    said = {
        index: Action(one.action, one.tag.stage, one.tag.micro_batch)
        for index, one in enumerate(pieces)
        if one.tag is not None
    }
    if schedule is None or not said:
        return
    index_of = {action: index for index, action in said.items()}
    before: dict[int, list[int]] = {edge.target: [] for edge in cut.edges}
    for edge in cut.edges:
        before[edge.target].append(edge.source)
    for steps in schedule.actions:
        parts = [part for step in steps for part in step.parts]
        for one, other in pairwise([index_of[p] for p in parts if p in index_of]):
            before.setdefault(other, []).append(one)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        waits = [str(said[index]) for index in error.args[1][::-1] if index in said]
        raise ScheduleError(
            f"{program} cannot follow the schedule: {' waits for '.join(waits)}, by "
            "its calls and the lists of the workers; gradients of a sum of all losses "
            "wait for all of them, so return the losses instead"
        ) from None
