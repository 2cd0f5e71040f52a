"""Recomputes a published table of pipeline bubbles (idle shares), and runs ZB-H1.

The table is from Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024,
and its published script. The interleaved column differs: here it includes all
dependencies, while the script omits the transfer from the last rank's chunk to the next
chunk of the first rank.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jdag import schedules
from jdag.scenario import Case
from jdag.scenario.player import FIGURES
from shapes import pipeline

# Workers, micro-batches, layers; us of forward, input gradient, weight gradient and
# communication; decimals of the published bubbles, in the order of `COLUMNS`.
ROWS = {
    "1.5B, 8 x 24": (8, 24, 24, (18_522, 18_086, 9_337, 601), "2431 1090 1585 1083"),
    "1.5B, 8 x 64": (8, 64, 24, (18_546, 18_097, 9_321, 762), "1240 0461 0674 0444"),
    "6.2B, 8 x 32": (8, 32, 32, (29_802, 29_428, 19_530, 577), "1898 0644 1045 0559"),
    "14.6B, 16 x 48": (16, 48, 48, (11_347, 11_248, 8_132, 377), "2552 1136 1397 0672"),
    "14.6B, 16 x 128": (
        *(16, 128, 48, (11_325, 11_308, 8_109, 378), "1251 0459 0576 0266"),
    ),
    "28.3B, 32 x 128": (
        *(32, 128, 64, (10_408, 10_204, 7_703, 408), "2168 1192 1106 0490"),
    ),
}
COLUMNS = ("1f1b", "interleaved", "zb_h1", "zb_h2")
MEANINGS = {
    "model": "row of the published table: size, workers x micro-batches",
    **dict.fromkeys(
        COLUMNS, "bubble, with the published one in brackets if it differs"
    ),
    "cells_as_published": "number of cells, of 24, that agree to four digits",
}


def bubbles(p: int, m: int, layers: int, costs_us: Sequence[int]) -> list[float]:
    """Compute the bubbles of one row, in the order of `COLUMNS`."""
    f, i, w, comm = [1_000 * cost for cost in costs_us]
    costs = {"forward": f, "input_grad": i, "weight_grad": w, "comm": comm}
    v = layers // p
    # A chunk has 1/v of the work. All times are multiplied by v to stay integers.
    chunked = schedules.interleaved(stages=p * v, chunks=v, micro_batches=m)
    return [
        schedules.one_f_one_b(stages=p, micro_batches=m).timeline(**costs).bubble,
        chunked.timeline(**{**costs, "comm": v * comm}).bubble,
        schedules.zb_h1(stages=p, micro_batches=m).timeline(**costs).bubble,
        schedules.zb_h2(stages=p, micro_batches=m).timeline(**costs).span_bubble,
    ]


def table() -> dict[str, Any]:
    """Return the table, and how many cells equal the published values."""
    columns: dict[str, Any] = {"model": [*ROWS], **{name: {} for name in COLUMNS}}
    same = 0
    for model, (p, m, layers, costs_us, published) in ROWS.items():
        row = bubbles(p, m, layers, costs_us)
        for name, bubble, digits in zip(COLUMNS, row, published.split(), strict=True):
            text, expected = f"{bubble:.4f}", f"0.{digits}"
            same += text == expected
            columns[name][model] = text if text == expected else f"{text} ({expected})"
    return {**columns, "cells_as_published": same}


def published(workers: Sequence[str], **settings: Any) -> Case:
    """Return the case `shapes.pipeline`, with the table added to its metrics."""
    case = pipeline(workers, **settings)
    return replace(case, figures={**FIGURES, **MEANINGS}, more=lambda cluster: table())
