"""XLA's cost estimate of a pair: floating-point operations and bytes accessed."""

from functools import lru_cache

from jdag.compute.pairs import PAIRS_MAX, Pair
from jdag.errors import JdagError


@lru_cache(maxsize=2 * PAIRS_MAX)
def xla_cost(pair: Pair, kind: str) -> tuple[int, int]:
    """Return (flops, bytes accessed) of the compiled forward or vjp of a pair.

    Both numbers are from `jax.stages.Compiled.cost_analysis`, and depend on XLA's
    platform and version; a missing number counts as 0. The vjp takes one cotangent for
    each tracked output. Raises JdagError if the function is unjitted, since XLA does
    not compile it.
    """
    if pair.source.unjitted:
        raise JdagError(
            f"{pair.name} is unjitted, so XLA has no cost estimate of it; set its "
            "times in DeviceModel(functions=)"
        )
    counts = [1] * sum(pair.out_tracked) if kind == "vjp" else None
    analysis = pair.lowered(counts).compile().cost_analysis() or {}
    return int(analysis.get("flops", 0)), int(analysis.get("bytes accessed", 0))
