"""Pipeline schedules as data: the order of each worker's stages and micro-batches.

    schedule = jdag.schedules.zb_h1(stages=4, micro_batches=8)
    schedule.check()
    schedule.makespan_ns(forward=18_522, input_grad=18_086, weight_grad=9_337, comm=601)

A `Schedule` has a list of actions for each worker. Builders return the published
schedules; `from_lists` and `from_csv` read and check other schedules. This package does
not need JAX.
"""

from jdag.schedules.actions import Action, Overlap
from jdag.schedules.builders import (
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from jdag.schedules.lists import from_csv, from_lists, to_csv
from jdag.schedules.schedule import Schedule
from jdag.schedules.timing import Span, Timeline

__all__ = [
    "Action",
    "Overlap",
    "Schedule",
    "Span",
    "Timeline",
    "dualpipe_v",
    "eager_one_f_one_b",
    "from_csv",
    "from_lists",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "to_csv",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
