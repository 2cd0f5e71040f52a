"""Ctrl-C at random moments of a program, again and again; run as a process of its own.

After each the cluster goes on: what comes next has the bits that it always has.
"""

import faulthandler
import os
import random
import signal
import sys
import threading

import jax

import jdag
from jdag.errors import JdagError
from tests.processes.test_mad_peers import small_program
from tests.tools.plan_cases import batch, bits, network, put
from tests.tools.rpc_breaking import breaking

HANGS_S = 60


def main(seed: int, count: int) -> None:
    jax.config.update("jax_enable_x64", True)
    rng = random.Random(seed)
    interrupted = 0
    with breaking() as nodes:
        node, cluster = nodes.nodes["a"], nodes.cluster
        undo = node.guard_signals()
        params = put(cluster, "bab")
        step = jdag.compile(network, cluster)

        def found() -> list[bytes]:
            planned = step.value_and_grad(params, *batch(0))
            return [*small_program(cluster), *bits(planned)]

        wanted = found()
        for _ in range(count):
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            fired = threading.Event()

            def fire(wait_s: float, fired: threading.Event = fired) -> None:
                threading.Event().wait(wait_s)
                os.kill(os.getpid(), signal.SIGINT)
                fired.set()

            thread = threading.Thread(target=fire, args=(rng.uniform(0, 0.02),))
            try:
                thread.start()
                while True:
                    was_fired = fired.is_set()
                    assert found() == wanted
                    if was_fired:  # Python loses one that comes in a finalizer.
                        os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                interrupted += 1
            except JdagError as error:  # What was interrupted may say so twice.
                sys.stdout.write(f"{type(error).__name__}: {error}\n")
                raise
            thread.join()
            assert found() == wanted
        undo()
        cluster.close()
        faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(f"interrupted {interrupted}\n")
