"""Runs a program on a worker when its engine starts one."""

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
    name = name_of(spawn.function)
    frame = ProgramFrame(state, port, spawn.context, spawn.path, name)
    result = failure = None
    state.frames[port] = frame
    try:
        for id in spawn.objects:
            if id not in port.host.objects:
                raise ContextError(f"{id} was dropped by cluster.drop")
            frame.objects[id] = port.host.objects[id]
        args, kwargs = frame.bound(spawn.arguments, {})
        returned = spawn.function(Context(frame), *args, **kwargs)
        frame.finish()
        result = frame.unbound(returned)
    except (Exception, SystemExit) as error:
        # A failure of a call keeps the call's path, so that callers count it as seen.
        failure = frame.failure_of(error) or replace(
            failure_of(error, port.worker, spawn.path, name), call_site=spawn.call_site
        )
    finally:
        frame.phase = FramePhase.LEFT
        del state.frames[port]
        frame.tasks.clear()  # The engine waits for tasks that still run.
    args = kwargs = returned = None  # Refs that still exist now are stored elsewhere.
    reply, discarded = frame.reply(result)
    return Returned(spawn.context, spawn.path, reply, failure, discarded)
