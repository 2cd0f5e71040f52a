"""How a program runs on a worker, when its engine asks for it."""

from msgspec.structs import replace

from jdag.context.cluster_state import ClusterState
from jdag.context.context import Context
from jdag.context.program_frame import FramePhase, ProgramFrame
from jdag.engine.functions import name_of
from jdag.engine.protocol import Returned, Spawn
from jdag.errors import ContextError
from jdag.runtime.failures import failure_of
from jdag.runtime.worker_runtime import ProgramPort


def run_program(state: ClusterState, port: ProgramPort, spawn: Spawn) -> Returned:
    """Run a program on a worker, in a context of its own frame.

    What it raises is the failure that it returns.
    """
    name = name_of(spawn.function)
    frame = ProgramFrame(state, port, spawn.context, spawn.path, name)
    result = failure = None
    state.frames[port] = frame
    try:
        for one in spawn.objects:
            if one not in port.host.objects:
                raise ContextError(f"{one} was dropped by cluster.drop")
            frame.objects[one] = port.host.objects[one]
        args, kwargs = frame.bound(spawn.arguments, {})
        returned = spawn.function(Context(frame), *args, **kwargs)
        frame.finish()
        result = frame.unbound(returned)
    except (Exception, SystemExit) as error:
        # What began elsewhere keeps its place, so that it counts as seen there too.
        failure = frame.failure_of(error) or replace(
            failure_of(error, port.worker, spawn.path, name), call_site=spawn.call_site
        )
    finally:
        frame.phase = FramePhase.LEFT
        del state.frames[port]
        frame.tasks.clear()  # The engine waits for those that still run.
    args = kwargs = returned = None  # What is still held now is held elsewhere.
    reply, discarded = frame.left(result)
    return Returned(spawn.context, spawn.path, reply, failure, discarded)
