"""What every test runs under: 64-bit JAX and repeatable Hypothesis."""

import jax
from hypothesis import settings

jax.config.update("jax_enable_x64", True)

# No deadline: a first compile takes as long as the machine is busy.
settings.register_profile("jdag", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("jdag")
