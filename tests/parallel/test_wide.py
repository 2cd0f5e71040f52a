"""What a program over several processes does together; tests of it are the checks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jdag.parallel.wide import collectives


def reduced(x: Any) -> Any:
    y = x * jax.lax.axis_index("all") + jax.lax.psum(x, "all")
    y = jax.lax.cond(True, lambda y: jax.lax.psum(y[:, 0], "all"), lambda y: y[:, 1], y)
    return jax.lax.all_gather(y, "all")


def test_collectives_are_those_over_the_axis_in_their_order():
    mesh = Mesh(np.array(jax.devices()[:2]), ("all",))
    spec = PartitionSpec("all")
    program = jax.shard_map(
        reduced, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    jaxpr = jax.make_jaxpr(program)(jnp.ones((4, 3)))
    found = ["psum(float64[2,3])", "psum(float64[2])", "all_gather(float64[2])"]
    assert collectives(jaxpr, "all") == found
    assert collectives(jaxpr, "rows") == []
