"""A call on a named device, or of arrays on one: puts around a pair.

The put of an argument on the call's device is a tracked identity: the vjp puts its
cotangent back on the device where the argument lives, so that what is summed there has
come there. The pair is as it was, shared and compiled for each device by JAX; puts are
outside of it, since inside jit JAX ignores them.

Invariant: an array that is held for a device is on it.
"""

from collections.abc import Sequence
from typing import Any

from jdag.compute.avals import Aval
from jdag.compute.devices import put, working_on
from jdag.compute.jaxprs import Reaches
from jdag.compute.pairs import Pair
from jdag.compute.tracing import Residuals
from jdag.wire.specs import Places, placed_spec

Device = str | None


class Placed:
    """A `Pair` with places: it is used as one, and has its names and shapes.

    Attributes:
        device: where it computes, None on the worker's default device.
        in_devices: where the cotangents of the tracked inputs go, in order.
        out_devices: where the outputs go, in order.
    """

    __slots__ = ("device", "in_devices", "out_devices", "pair")

    def __init__(
        self,
        pair: Pair,
        device: Device,
        in_devices: tuple[Device, ...],
        out_devices: tuple[Device, ...],
    ) -> None:
        self.pair = pair
        self.device = device
        self.in_devices = in_devices
        self.out_devices = out_devices

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.pair.name

    @property
    def may_raise(self) -> bool:
        """Whether forward waits for what calls back."""
        return bool(self.pair.may_raise)

    @property
    def avals(self) -> tuple[Aval, ...]:
        """What the arguments are."""
        return self.pair.avals

    @property
    def tracked(self) -> tuple[bool, ...]:
        """To which arguments cotangents flow back."""
        return self.pair.tracked

    @property
    def out_avals(self) -> tuple[Aval, ...]:
        """What the outputs are."""
        return self.pair.out_avals

    @property
    def out_tree(self) -> Any:
        """The structure of the outputs."""
        return self.pair.out_tree

    @property
    def out_tracked(self) -> tuple[bool, ...]:
        """From which outputs cotangents flow back."""
        return self.pair.out_tracked

    @property
    def residual_bytes(self) -> int:
        """What residuals hold beyond arguments and outputs."""
        return self.pair.residual_bytes

    @property
    def args_kept(self) -> tuple[int, ...]:
        """Which arguments residuals keep; what was put here counts as the argument."""
        return self.pair.args_kept

    @property
    def outputs_kept(self) -> tuple[int, ...]:
        """Which outputs residuals keep."""
        return self.pair.outputs_kept

    @property
    def reaches(self) -> Reaches:
        """Which tracked outputs each tracked input reaches."""
        return self.pair.reaches

    @property
    def spec(self) -> bytes:
        """All that another process needs to make this; see `jdag.wire.specs`."""
        places = Places(self.device, self.in_devices, self.out_devices)
        return placed_spec(self.pair.spec, places)

    def forward(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], Residuals | None]:
        """Run the function on its device; see `Pair.forward`."""
        with working_on(self.device):
            outputs, residuals = self.pair.forward(put(args, self.device))
        return _spread(outputs, self.out_devices), residuals

    def vjp(
        self, residuals: Residuals, cotangents: Sequence[Sequence[Any]]
    ) -> tuple[Any, ...]:
        """Carry cotangents back, each to where its input lives; see `Pair.vjp`."""
        with working_on(self.device):
            here = [put(addends, self.device) for addends in cotangents]
            gradients = self.pair.vjp(residuals, here)
        return _spread(gradients, self.in_devices)

    def __repr__(self) -> str:
        return f"{self.pair} on {self.device or 'the default device'}"


def _spread(values: Sequence[Any], devices: Sequence[Device]) -> tuple[Any, ...]:
    pairs = zip(values, devices, strict=True)
    return tuple([put((value,), device)[0] for value, device in pairs])


def placed(
    pair: Pair,
    device: Device,
    sources: Sequence[Device],
    targets: Sequence[Device] | None = None,
) -> Any:
    """Return a pair with places; the pair itself where all is on the default device.

    Args:
        pair: what computes.
        device: where.
        sources: where each of the arguments lives.
        targets: where each output goes; None, all stay on the device.
    """
    out = (device,) * len(pair.out_avals) if targets is None else tuple(targets)
    if device is None and not any(sources) and not any(out):
        return pair
    places = zip(sources, pair.tracked, strict=True)
    return Placed(pair, device, tuple([s for s, tracked in places if tracked]), out)
