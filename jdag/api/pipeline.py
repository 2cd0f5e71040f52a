"""A pipeline of stages over micro-batches, as the calls of one program.

Inputs:  the function of each stage and a loss; parameters by stage; micro-batches.
Outputs: refs to the loss of each micro-batch, the roots of the backward pass; and the
    metrics of the loss function.
Invariants: the call of stage s for micro-batch m is tagged with s and m (`ctx.tag`);
    the loss is part of the last stage. Calls are ordered by micro-batch, so gradients
    have the same bits under every schedule.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jdag.compute.pytrees import flatten_refs
from jdag.compute.refs import is_ref
from jdag.context.context import Context
from jdag.engine.functions import name_of, remote
from jdag.errors import JdagError, kind_of, unusable


def pipeline(
    stages: Sequence[Callable[..., Any]], loss: Callable[..., Any]
) -> "Pipeline":
    """Return a pipeline of stages; each stage takes the output of the stage before.

    Call it in a context: `losses = pipe(ctx, params, inputs, targets)`, or `losses,
    metrics = pipe(...)` if the loss has metrics; then `ctx.backward(*losses)`. Under a
    schedule (`jdag.simulate(..., schedule=)`) the schedule determines the order and the
    workers. Without a schedule, a stage runs on the worker of its parameters.

    Args:
        stages: the functions `(params, x) -> x` of the stages, in order.
        loss: a function `(x, target) -> scalar` of the last stage's output, or `(x,
            target) -> (scalar, metrics)`, where `metrics` is a pytree that is not
            differentiated.

    Raises:
        JdagError: `stages` is empty, or a stage or the loss is not a function.
    """
    return Pipeline(stages, loss)


class Pipeline:
    """A pipeline of stages over micro-batches. `jdag.pipeline` returns it."""

    def __init__(
        self, stages: Sequence[Callable[..., Any]], loss: Callable[..., Any]
    ) -> None:
        if isinstance(stages, str) or not isinstance(stages, Sequence) or not stages:
            raise JdagError(unusable("stages", stages, "a list of functions"))
        named = {f"stages[{index}]": fn for index, fn in enumerate(stages)}
        for name, fn in {**named, "loss": loss}.items():
            if not callable(fn):
                raise JdagError(unusable(name, fn, "a function"))
        self.stages = tuple(stages)
        self.loss = loss

    def __call__(
        self,
        ctx: Context,
        params: Sequence[Any],
        inputs: Sequence[Any],
        targets: Sequence[Any],
    ) -> Any:
        """Call all stages for all micro-batches; return a list of refs to the losses.

        If the loss function returns metrics, this returns two lists: losses, metrics.

        Args:
            ctx: an open context.
            params: for each stage a pytree of refs, on the worker of the stage.
            inputs: for each micro-batch the input of the first stage.
            targets: for each micro-batch the target of the loss.

        Raises:
            JdagError: the numbers of params and stages, or of targets and inputs,
                differ; a stage has no refs; or the loss function's result has another
                structure. Also the errors of `ctx.call`.
            ScheduleError: the schedule has a different number of stages, or fewer
                micro-batches.
        """
        self._check(ctx, params, inputs, targets)
        workers = [self._worker(ctx, s, tree) for s, tree in enumerate(params)]
        losses: list[Any] = []
        metrics: list[Any] = []
        pairs = zip(inputs, targets, strict=True)
        for micro_batch, (x_in, target) in enumerate(pairs):
            x = x_in
            for stage, fn in enumerate(self.stages):
                worker, tree = workers[stage], params[stage]
                with ctx.tag(stage=stage, micro_batch=micro_batch):
                    if stage + 1 < len(self.stages):
                        x = ctx.call(worker, fn, tree, x)
                    else:
                        x = ctx.call(worker, last_stage, fn, self.loss, tree, x, target)
            has_metrics = isinstance(x, tuple) and len(x) == 2
            loss, *rest = x if has_metrics else (x,)
            if not is_ref(loss):
                kind = f"{kind_of(x)} of {len(x)}" if type(x) is tuple else kind_of(x)
                raise JdagError(
                    f"{name_of(self.loss)} returned {kind}: expected a "
                    "loss, or (loss, metrics), where the loss is one array"
                )
            losses.append(loss)
            metrics += rest
        return (losses, metrics) if metrics else losses

    def _check(self, ctx: Context, params: Any, inputs: Any, targets: Any) -> None:
        for name, values, count, unit in (
            ("params", params, len(self.stages), "stages"),
            ("inputs", inputs, len(targets), "targets"),
        ):
            if len(values) != count:
                raise JdagError(
                    f"{name} are {len(values)}: expected one for each of {count} {unit}"
                )
        schedule = ctx.state.schedule
        if schedule is None:
            return
        for name, count, scheduled, may_be_fewer in (
            ("stages", len(self.stages), schedule.stages, False),
            ("micro-batches", len(inputs), schedule.micro_batches, True),
        ):
            if count > scheduled or (count < scheduled and not may_be_fewer):
                raise JdagError(
                    f"the pipeline has {count} {name}, but the schedule has {scheduled}"
                )

    def _worker(self, ctx: Context, stage: int, params: Any) -> str:
        if ctx.state.schedule is not None:
            return ctx.state.schedule.worker(stage)
        refs = [ref for ref in flatten_refs(params, is_ref)[0] if is_ref(ref)]
        if not refs:
            raise JdagError(
                f"params[{stage}] is {kind_of(params)} without refs, so the worker of "
                f"stage {stage} is unknown: make leaves by cluster.put"
            )
        worker: str = refs[0].worker
        return worker

    def __repr__(self) -> str:
        return f"Pipeline({len(self.stages)} stages)"


@remote
def last_stage(
    fn: Callable[..., Any], loss: Callable[..., Any], params: Any, x: Any, target: Any
) -> Any:
    return loss(fn(params, x), target)
