"""A pipeline of stages over micro-batches, written as the calls of one program.

Inputs:  the function of each stage and a loss; parameters by stage; micro-batches.
Outputs: the loss of each micro-batch, whose backward passes are the pipeline's; and
    what the loss function returns beside it.
Invariants: the call of stage s for micro-batch m is marked so (`ctx.tag`); the loss is
    part of the last stage. Calls come by micro-batch, so gradients have the same bits
    whatever the schedule.
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
    """Return a pipeline of stages that run one after the other.

    Call it in a context: `losses = pipe(ctx, params, inputs, targets)`, or `losses,
    metrics = pipe(...)` if the loss has some, then `ctx.backward(*losses)`. Under a
    schedule (`jdag.simulate(..., schedule=)`) the work is done in its order, on its
    workers; else on those of the parameters.

    Args:
        stages: the functions `(params, x) -> x`; that of stage s is at index s.
        loss: `(x, target) -> scalar` of what the last stage gives; or `-> (scalar,
            metrics)`, a pytree that is returned and not differentiated.

    Raises:
        JdagError: no stages, or one that is no function.
    """
    return Pipeline(stages, loss)


class Pipeline:
    """The calls of all stages for all micro-batches; `jdag.pipeline` makes one."""

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
        """Call all stages for all micro-batches; return a ref to each one's loss.

        Of a loss with metrics it returns two lists: of the losses, and of the metrics.

        Args:
            ctx: an open context.
            params: for each stage a pytree of refs, on the worker that has the stage.
            inputs: for each micro-batch what the first stage gets.
            targets: for each micro-batch what the loss gets.

        Raises:
            JdagError: another number of params than of stages, or of targets than of
                inputs; a stage without refs; a loss function that returns neither; or
                as `ctx.call` does.
            ScheduleError: the schedule has another number of stages, or fewer micro-
                batches.
        """
        self._check(ctx, params, inputs, targets)
        workers = [self._worker(ctx, s, of) for s, of in enumerate(params)]
        losses: list[Any] = []
        metrics: list[Any] = []
        for micro_batch, given in enumerate(inputs):
            x, target = given, targets[micro_batch]
            for stage, fn in enumerate(self.stages):
                to, of = workers[stage], params[stage]
                with ctx.tag(stage=stage, micro_batch=micro_batch):
                    if stage + 1 < len(self.stages):
                        x = ctx.call(to, fn, of, x)
                    else:
                        x = ctx.call(to, last_stage, fn, self.loss, of, x, target)
            has_metrics = isinstance(x, tuple) and len(x) == 2
            loss, *rest = x if has_metrics else (x,)
            if not is_ref(loss):
                kind = f"{kind_of(x)} of {len(x)}" if type(x) is tuple else kind_of(x)
                raise JdagError(
                    f"{name_of(self.loss)} returned {kind}: allowed is a "
                    "loss, or (loss, metrics), where the loss is one array"
                )
            losses.append(loss)
            metrics += rest
        return (losses, metrics) if metrics else losses

    def _check(self, ctx: Context, params: Any, inputs: Any, targets: Any) -> None:
        for name, given, count, of in (
            ("params", params, len(self.stages), "stages"),
            ("inputs", inputs, len(targets), "targets"),
        ):
            if len(given) != count:
                raise JdagError(
                    f"{name} are {len(given)}: allowed is one for each of {count} {of}"
                )
        schedule = ctx.state.schedule
        if schedule is None:
            return
        for name, here, there, few in (
            ("stages", len(self.stages), schedule.stages, False),
            ("micro-batches", len(inputs), schedule.micro_batches, True),
        ):
            if here > there or (here < there and not few):
                raise JdagError(
                    f"the pipeline has {here} {name}, and the schedule {there}"
                )

    def _worker(self, ctx: Context, stage: int, params: Any) -> str:
        """The worker of a stage: that of the schedule, or else of its first ref."""
        if ctx.state.schedule is not None:
            return ctx.state.schedule.worker(stage)
        refs = [ref for ref in flatten_refs(params, is_ref)[0] if is_ref(ref)]
        if not refs:
            raise JdagError(
                f"params[{stage}] is {kind_of(params)} without refs, so no worker has "
                f"stage {stage}: put them by cluster.put"
            )
        worker: str = refs[0].worker
        return worker

    def __repr__(self) -> str:
        return f"Pipeline({len(self.stages)} stages)"


@remote
def last_stage(
    fn: Callable[..., Any], loss: Callable[..., Any], params: Any, x: Any, target: Any
) -> Any:
    """The last stage and the loss, as one call."""
    return loss(fn(params, x), target)
