"""Tags of calls: stage and micro-batch.

Inputs:  numbers of stage and micro-batch; the schedule of the cluster, if it has one.
Outputs: the tag of each call; an error if a compiled plan can never follow the
    schedule.
Invariants: under a schedule, a program calls each stage of each micro-batch once, on
    the worker that has the stage. Values that several micro-batches read, such as
    weights of another worker, are moved by a separate transfer. A transfer returns all
    its cotangents at once, so otherwise the backward of one micro-batch would wait for
    the backward of the others.
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
    schedule: Schedule | None = frame.state.schedule
    stages = U32_MAX if schedule is None else schedule.stages
    micro_batches = U32_MAX if schedule is None else schedule.micro_batches
    for key, value, count in (
        ("stage", stage, stages),
        ("micro_batch", micro_batch, micro_batches),
    ):
        if type(value) is not int or not 0 <= value < count:
            source = "" if schedule is None else ", as in the schedule"
            allowed = f"an integer from 0 to {count - 1}{source}"
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
    """Move the arguments that a scheduled call may share with other micro-batches.

    These arguments are tracked values on other workers that no call of this micro-batch
    has computed.
    """
    tag: Tag = frame.tag
    if fn is transferred or not tag.listed or frame.state.recording:
        return  # Plans send each value separately.
    shared = {
        (ref.key, worker): ref
        for _, ref in parts.refs
        if is_ref(ref)
        and (ref.tracked and ref.owner != worker)
        and frame.batches.get(ref.key.name) != tag.micro_batch
        and (ref.key, worker) not in frame.apart
    }
    if shared:
        frame.apart.update(dict.fromkeys(shared))
        move(named(worker), list(shared.values()))


def tag_of(frame: Any, worker: str, device: str | None, fn: Any) -> Tag | None:
    """Return the tag of a call, or None if the call is a move."""
    tag: Tag = frame.tag
    if fn is transferred:
        return None
    if not tag.listed:
        return tag
    stage, schedule = tag.stage, frame.state.schedule
    place = named(worker) if device is None else f"{named(worker)}/{device}"
    if place != schedule.worker(stage):
        raise ScheduleError(
            f"{name_of(fn)} is called on {place!r} as stage {stage}, but the schedule "
            f"has this stage on {schedule.worker(stage)!r}"
        )
    forward = Action("F", stage, tag.micro_batch)
    if forward in frame.acted:
        raise ScheduleError(
            f"{name_of(fn)} is a second call of stage {stage} and micro-batch "
            f"{tag.micro_batch}, after {frame.acted[forward]}. Under a schedule a "
            "context can run a pipeline only once: run it again in another context, "
            "`with cluster.context() as other:`. If a stage has two functions, join "
            "them, or call one outside of ctx.tag"
        )
    frame.acted[forward] = name_of(fn)
    frame.batches[(*frame.prefix, frame.calls + 1)] = tag.micro_batch
    return tag


def check_steps(program: str, schedule: Schedule | None, cut: CutPlan) -> None:
    segments = [piece.segment for piece in cut.pieces]
    actions = {
        index: Action(segment.action, segment.tag.stage, segment.tag.micro_batch)
        for index, segment in enumerate(segments)
        if segment.tag is not None
    }
    if schedule is None or not actions:
        return
    index_of = {action: index for index, action in actions.items()}
    before: dict[int, list[int]] = {edge.target: [] for edge in cut.edges}
    for edge in cut.edges:
        before[edge.target].append(edge.source)
    for steps in schedule.actions:
        parts = [part for step in steps for part in step.parts]
        for first, second in pairwise([index_of[p] for p in parts if p in index_of]):
            before.setdefault(second, []).append(first)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        cycle = error.args[1][::-1]
        waits = [str(actions[index]) for index in cycle if index in actions]
        raise ScheduleError(
            f"{program} cannot follow the schedule: by its calls and the workers' "
            f"lists of actions, {' waits for '.join(waits)}; gradients of a sum of all "
            "losses wait for every loss, so return the losses instead"
        ) from None
