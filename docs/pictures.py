"""Draws docs/_static/timeline.svg: steps of three schedules in virtual time.

    python docs/pictures.py

Each step runs in `jdag.simulate`; the bars are the jobs of its trace. Colours and the
grey of the text are readable on white and on black.
"""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp

import jdag

STAGES, MICRO_BATCHES = 4, 8
SCHEDULES = (
    ("GPipe", jdag.schedules.gpipe),
    ("1F1B", jdag.schedules.one_f_one_b),
    ("ZB-H1", jdag.schedules.zb_h1),
)
KINDS = {
    "F": ("#4c8dd6", "forward"),
    "B": ("#e08a2e", "backward; in ZB-H1 its half for the inputs"),
    "I": ("#e08a2e", ""),
    "W": ("#3f9d6b", "its half for the weights; numbers are micro-batches"),
}
TEXT = "#808894"
LEFT, ROW, GAP, TOP, WIDTH = 84, 24, 46, 30, 960
NS = 1_000  # Of a forward and of each half of a backward.


def layer(w: jnp.ndarray, x: jnp.ndarray) -> jnp.ndarray:
    """Compute one stage."""
    return jnp.tanh(x @ w)


def mse(x: jnp.ndarray, y: jnp.ndarray) -> jnp.ndarray:
    """Compute the loss of the last stage."""
    return jnp.mean((x - y) ** 2)


def bars(schedule: jdag.schedules.Schedule) -> Iterator[tuple[int, str, int, int]]:
    """Run a step; yield (worker's index, action, start_ns, end_ns) of each job."""
    halves = (NS, NS, NS)
    devices = jdag.sim.DeviceModel(functions={"layer": halves, "last_stage": halves})
    with jdag.simulate(
        schedule.workers, seed=0, schedule=schedule, devices=devices
    ) as cluster:
        eye, x = jnp.eye(3), jnp.ones((2, 3))
        params = [cluster.put(schedule.worker(s), eye) for s in range(STAGES)]
        pipe = jdag.pipeline([layer] * STAGES, mse)
        with cluster.context() as ctx:
            ctx.backward(*pipe(ctx, params, [x] * MICRO_BATCHES, [x] * MICRO_BATCHES))
        for record in cluster.trace.of_kind("start"):
            detail = record.named
            if detail["action"]:
                yield (
                    schedule.workers.index(record.worker),
                    detail["action"],
                    record.time_ns,
                    record.time_ns + detail["cost_ns"],
                )


def svg() -> Iterator[str]:
    """Yield the lines of the picture."""
    panels = [(name, [*bars(b(stages=4, micro_batches=8))]) for name, b in SCHEDULES]
    longest = max(end for _, jobs in panels for *_, end in jobs)
    scale = (WIDTH - LEFT - 16) / longest
    height = TOP + len(panels) * (STAGES * ROW + GAP)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13" role="img">'
    )
    yield "<title>Steps of GPipe, 1F1B and ZB-H1 in virtual time</title>"
    x = LEFT
    for kind in ("F", "B", "W"):
        color, meaning = KINDS[kind]
        yield f'<rect x="{x}" y="7" width="14" height="14" rx="2" fill="{color}"/>'
        yield f'<text x="{x + 20}" y="19" fill="{TEXT}">{meaning}</text>'
        x += 44 + 6 * len(meaning)
    for number, (name, jobs) in enumerate(panels):
        yield from _panel(TOP + number * (STAGES * ROW + GAP), name, jobs, scale)
    yield "</svg>"


def _panel(
    top: int, name: str, jobs: list[tuple[int, str, int, int]], scale: float
) -> Iterator[str]:
    end_ns = max(end for *_, end in jobs)
    y = top + 18
    yield (
        f'<text x="{LEFT}" y="{y}" fill="{TEXT}"><tspan font-weight="600">{name}'
        f"</tspan>  a step takes {end_ns // 1000} µs of virtual time</text>"
    )
    for row in range(STAGES):
        at = y + 8 + row * ROW
        yield (
            f'<text x="{LEFT - 10}" y="{at + 16}" fill="{TEXT}" '
            f'text-anchor="end">worker {row}</text>'
        )
        yield (
            f'<rect x="{LEFT}" y="{at}" width="{end_ns * scale:.1f}" '
            f'height="{ROW - 3}" rx="2" fill="{TEXT}" opacity="0.14"/>'
        )
    for row, action, start, end in jobs:
        kind = next(letter for letter in action if letter.isalpha())
        at, left = y + 8 + row * ROW, LEFT + start * scale
        width = (end - start) * scale - 1
        yield (
            f'<rect x="{left:.1f}" y="{at}" width="{width:.1f}" '
            f'height="{ROW - 3}" rx="2" fill="{KINDS[kind][0]}"/>'
        )
        micro_batch = int(action.partition(kind)[2]) + 1
        yield (
            f'<text x="{left + width / 2:.1f}" y="{at + 15}" fill="#fff" '
            f'font-size="12" text-anchor="middle">{micro_batch}</text>'
        )


if __name__ == "__main__":
    folder = Path(__file__).parent / "_static"
    (folder / "timeline.svg").write_text("\n".join(svg()) + "\n", encoding="utf-8")
