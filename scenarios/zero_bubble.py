"""The published table of bubbles of pipeline schedules, beside one run of ZB-H1.

Source: Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, and the
script of its artifact. The interleaved column has all dependencies, of which the script
leaves out the hand-over from the last rank's chunk to the first rank's next one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jdag import schedules
from jdag.scenario.case import FIGURES, Case
from shapes import pipeline

# p, m, layers; F, I, W and communication in us; the digits of the bubbles of `COLUMNS`.
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
    "model": "of the published table: size, workers x micro-batches",
    **dict.fromkeys(COLUMNS, "bubble; in brackets the published one, where it differs"),
    "cells_as_published": "of 24 cells, those that are the same to four digits",
}


def bubbles(p: int, m: int, layers: int, costs_us: Sequence[int]) -> list[float]:
    """The bubbles of one row, exact to the ns, in the order of `COLUMNS`."""
    f, i, w, comm = [1_000 * cost for cost in costs_us]
    costs = {"forward": f, "input_grad": i, "weight_grad": w, "comm": comm}
    v = layers // p
    # A chunk has 1/v of the work; all times are scaled by v, to stay whole.
    chunked = schedules.interleaved(stages=p * v, chunks=v, micro_batches=m)
    return [
        schedules.one_f_one_b(stages=p, micro_batches=m).timeline(**costs).bubble,
        chunked.timeline(**{**costs, "comm": v * comm}).bubble,
        schedules.zb_h1(stages=p, micro_batches=m).timeline(**costs).bubble,
        schedules.zb_h2(stages=p, micro_batches=m).timeline(**costs).span_bubble,
    ]


def table() -> dict[str, Any]:
    """The figures of the table, by model."""
    found: dict[str, Any] = {"model": [*ROWS], **{name: {} for name in COLUMNS}}
    same = 0
    for model, (p, m, layers, costs_us, published) in ROWS.items():
        of = bubbles(p, m, layers, costs_us)
        for name, bubble, digits in zip(COLUMNS, of, published.split(), strict=True):
            said, wanted = f"{bubble:.4f}", f"0.{digits}"
            same += said == wanted
            found[name][model] = said if said == wanted else f"{said} ({wanted})"
    return {**found, "cells_as_published": same}


def published(workers: Sequence[str], **settings: Any) -> Case:
    """The pipeline of `shapes`, with the published table beside its figures."""
    case = pipeline(workers, **settings)
    return replace(case, figures={**FIGURES, **MEANINGS}, more=lambda cluster: table())
