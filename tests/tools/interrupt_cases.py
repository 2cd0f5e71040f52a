"""Ctrl-C at random moments of a program, again and again; run as a process of its own.

After each the cluster goes on: what comes next has the bits that it always has.
"""

import faulthandler
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import jdag
from jdag.errors import JdagError
from tests.processes.test_mad_peers import small_program
from tests.tools.plan_cases import batch, bits, network, paired, put
from tests.tools.rpc_breaking import breaking

HANGS_S = 60


def whole(cluster: Any) -> Callable[[], None]:
    """A program and gradients of a plan, which have the bits that they had at first."""
    params = put(cluster, "bab")
    step = jdag.compile(network, cluster)

    def found() -> list[bytes]:
        planned = step.value_and_grad(params, *batch(0))
        return [*small_program(cluster), *bits(planned)]

    def check() -> None:
        assert found() == wanted

    wanted = found()
    return check


def steps(cluster: Any) -> Callable[[], None]:
    """Steps that add 1 to each leaf, on all workers or on none."""
    leaves = [cluster.put(worker, np.zeros(3)) for worker in "bcab"]
    optimizer = jdag.Optimizer(optax.sgd(-1.0), leaves)
    step = jdag.compile(paired, cluster, optimizer)
    count = 0.0

    def check() -> None:
        nonlocal count
        for _ in range(3):
            step(leaves, np.ones(()))
        values = np.array(jdag.fetch(leaves))
        assert np.ptp(values) == 0.0 and values.min() >= count, (values, count)
        count = values.min()

    return check


def main(seed: int, count: int, what: str = "whole") -> None:
    jax.config.update("jax_enable_x64", True)
    rng = random.Random(seed)
    interrupted = 0
    with breaking() as nodes:
        node, cluster = nodes.nodes["a"], nodes.cluster
        undo = node.guard_signals()
        check = {"whole": whole, "steps": steps}[what](cluster)
        check()
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
                    check()
                    if was_fired:  # Python loses one that comes in a finalizer.
                        os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                interrupted += 1
            except JdagError as error:  # What was interrupted may say so twice.
                sys.stdout.write(f"{type(error).__name__}: {error}\n")
                raise
            thread.join()
            check()
        undo()
        cluster.close()
        faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(f"interrupted {interrupted}\n")
