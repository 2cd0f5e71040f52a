"""What every test runs under: 64-bit JAX and repeatable Hypothesis."""

import gc
import signal
from collections.abc import Iterator
from itertools import compress
from typing import Any

import jax
import pytest
from hypothesis import settings

from jdag.api.drivers import simulate
from tests.tools.connection_cases import either, make, sides, tls  # noqa: F401
from tests.tools.spreading import Groups, place_of
from tests.tools.tiers import FIRST, sized

jax.config.update("jax_enable_x64", True)

# A shell starts what it has in the background with SIGINT ignored, and what that starts
# ignores it as well; tests of Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a first compile takes as long as the machine is busy.
settings.register_profile(
    "jdag",
    deadline=None,
    derandomize=True,
    print_blob=True,
    max_examples=sized(40, 100),
)
settings.load_profile("jdag")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out the second tier; of the rest, what takes longest begins first."""
    if FIRST:
        second = [bool(item.get_closest_marker("second")) for item in items]
        config.hook.pytest_deselected(items=[*compress(items, second)])
        items[:] = [item for item, left in zip(items, second, strict=True) if not left]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: place_of(item.nodeid))


@pytest.fixture(scope="session", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is made for a while, such as logs, lies where pytest tidies up."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tempfile.tempdir", folder)
        patched.setenv("TMPDIR", folder)
        yield


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What earlier modules left is not looked at again by each `gc.collect()`."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def cluster():
    """Four workers in virtual time; the main program runs on the first, a.

    After the test none has a context or a pass, but those of objects that it hosts.
    """
    from tests.tools.face_cases import nothing_is_left  # noqa: PLC0415 - 64 bits.

    with simulate(["a", "b", "c", "d"], seed=0) as made:
        yield made
        if not (made.state.closed or made._object_frames):
            nothing_is_left(made)
