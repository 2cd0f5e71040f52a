"""What every test runs under: 64-bit JAX and repeatable Hypothesis."""

from collections.abc import Iterator

import jax
import pytest
from hypothesis import settings

from jdag.drivers import simulate
from tests.peer_cases import either, make, sides, tls  # noqa: F401

jax.config.update("jax_enable_x64", True)

# No deadline: a first compile takes as long as the machine is busy.
settings.register_profile("jdag", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("jdag")


@pytest.fixture(scope="session", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is made for a while, such as logs, lies where pytest tidies up."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tempfile.tempdir", folder)
        patched.setenv("TMPDIR", folder)
        yield


@pytest.fixture
def cluster():
    """Four workers in virtual time; the main program runs on the first, a."""
    with simulate(["a", "b", "c", "d"], seed=0) as made:
        yield made
