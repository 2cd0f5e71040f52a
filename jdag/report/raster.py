"""What many workers did, as a raster: a row a worker, a pixel a slice of time.

A pixel mixes the colours of what its worker did in its time by their shares of it, so
that no job, however short, is lost or drawn longer than it was.
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

    The rows are the workers, from the top; the window is in nanoseconds, and `colors`
    are by what a job is drawn as.
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
    """The share of each pixel's time that these jobs took.

    A job's start adds its row's rest of the pixel that it lies in, and all pixels to
    the right; its end takes away the same. Sums from the left make steps of that.
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
