"""The timeline of many workers as a raster: one row per worker, pixels are time slices.

A pixel mixes the colours of its worker's jobs by their shares of the slice's time, so
no job, however short, is lost or drawn longer than it was.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from jdag.report.spans import Job, Window

COLUMNS = 1600


def mixed(
    jobs: Sequence[Job],
    workers: Sequence[str],
    window: Window,
    colors: Mapping[str, str],
    idle: str,
) -> NDArray[np.float64]:
    """Return the picture, (workers, COLUMNS, 3), each number from 0 to 1.

    The rows are the workers, from the top; the window is in nanoseconds; the keys of
    `colors` are values of `Job.drawn_as`.
    """
    ground = np.array(to_rgb(idle))
    picture = np.tile(ground, (len(workers), COLUMNS, 1))
    rows = {worker: row for row, worker in enumerate(workers)}
    for kind, color in colors.items():
        mine = [j for j in jobs if j.drawn_as == kind and j.worker in rows]
        share = _shares(mine, rows, window)
        picture += share[:, :, None] * (np.array(to_rgb(color)) - ground)
    return picture.clip(0, 1)


def _shares(
    jobs: Sequence[Job], rows: Mapping[str, int], window: Window
) -> NDArray[np.float64]:
    """Return the share of each pixel's time that these jobs took.

    A job's start adds the rest of its pixel and all pixels to its right; its end
    subtracts the same. A cumulative sum over each row turns these steps into shares.
    """
    first_ns, last_ns = window
    per_ns = COLUMNS / max(last_ns - first_ns, 1)
    row = np.array([rows[job.worker] for job in jobs], dtype=np.intp)
    steps = np.zeros((len(rows), COLUMNS + 2))
    for sign, times_ns in (
        (1, [job.start_ns for job in jobs]),
        (-1, [job.end_ns for job in jobs]),
    ):
        cut = np.clip(np.array(times_ns, dtype=np.int64), first_ns, last_ns) - first_ns
        at = cut * per_ns
        column = np.floor(at).astype(np.intp)
        np.add.at(steps, (row, column), sign * (column + 1 - at))
        np.add.at(steps, (row, column + 1), sign * (at - column))
    shares: NDArray[np.float64] = np.cumsum(steps, axis=1)[:, :COLUMNS].clip(0, 1)
    return shares
