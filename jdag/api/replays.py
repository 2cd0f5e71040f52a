"""A script that is run again: its own process repeats what its workers have journaled.

Inputs:  variables that `jdag replay` sets; the journals.
Outputs: a cluster, in place of one of processes; one line that says how it went.
"""

import os
import sys
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from jdag.api.cluster import Cluster
from jdag.api.cluster_state import ClusterState
from jdag.api.programs import run_program
from jdag.errors import JournalsEnd, ReplayError, ScenarioError
from jdag.rpc.script import program_name
from jdag.runtime.journal import read_journals
from jdag.sim.replaying import Replaying

REPLAY = "JDAG_REPLAY"  # The folder of the journals that a script repeats.
REPLAYED = "JDAG_REPLAYED"  # A file that is written once all of them are repeated.


def replayed(state: ClusterState, folder: Path) -> Cluster:
    """Return a cluster that repeats the run of these journals.

    Raises:
        ScenarioError: they are not of this program, or of other workers.
    """
    # What ends the script by an error of its journals is the user's mistake.
    sys.excepthook = partial(_in_one_line, sys.excepthook, state)
    journals = read_journals(folder, state.workers, program_name())

    def say(inputs: int) -> None:
        text = f"as in {folder}: {inputs:,} events of {len(state.workers)} workers"
        text += "; there the journals end, at journal_bytes\n" * driver.is_cut or "\n"
        sys.stderr.write(text)
        if (path := os.environ.get(REPLAYED)) is not None:
            Path(path).write_text(text)

    run = partial(run_program, state)
    state.driver = driver = Replaying(state.workers, journals, run, say)
    return Cluster(state, driver.port)


def _in_one_line(
    otherwise: Any,
    state: ClusterState,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    if isinstance(error, JournalsEnd):
        state.driver.close()
        raise SystemExit(0)
    if isinstance(error, ReplayError | ScenarioError):
        sys.stderr.write(f"jdag: {' '.join(str(error).split())}\n")
        raise SystemExit(1 if isinstance(error, ReplayError) else 2)
    otherwise(kind, error, trace)
