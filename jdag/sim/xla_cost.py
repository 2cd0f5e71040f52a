"""What XLA says that a pair costs: floating-point operations and bytes accessed."""

from functools import lru_cache

from jdag.compute.pairs import PAIRS_MAX, Pair
from jdag.errors import JdagError


@lru_cache(maxsize=2 * PAIRS_MAX)
def xla_cost(pair: Pair, kind: str) -> tuple[int, int]:
    """Return (flops, bytes accessed) of the compiled forward or vjp of a pair.

    These are the figures of `jax.stages.Compiled.cost_analysis`, which depend on the
    platform and version of XLA; what it does not report is 0. The vjp is that of one
    cotangent for each tracked output.

    Args:
        pair: of a function that is jitted.
        kind: "forward" or "vjp".

    Raises:
        JdagError: the function runs as Python, which XLA does not see.
    """
    if pair.source.unjitted:
        raise JdagError(
            f"{pair.name} runs unjitted: XLA has no costs of it; give its times in"
            " DeviceModel(functions=)"
        )
    counts = [1] * sum(pair.out_tracked) if kind == "vjp" else None
    found = pair.lowered(counts).compile().cost_analysis() or {}
    return int(found.get("flops", 0)), int(found.get("bytes accessed", 0))
