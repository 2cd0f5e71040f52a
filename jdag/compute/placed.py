"""A call on a named device, or of arrays on one: device transfers around a pair.

Transferring an argument to the call's device is a tracked identity: the vjp puts its
cotangent back on the device of the argument, so that cotangents summed there are all on
that device. The pair is unchanged, shared, and compiled per device by JAX; transfers
are outside of it, since inside jit JAX ignores them.

Invariant: an array that is held for a device is on it.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import Any

from jdag.compute.devices import put, working_on
from jdag.compute.pairs import PAIRS_MAX, Pair
from jdag.compute.tracing import Residuals

_Device = str | None


class Placed(Pair):
    """A pair with devices, which shares the pair's compiled functions.

    `device` is where it computes, `in_devices` are where the cotangents of the tracked
    inputs go, `out_devices` where the outputs go; None is the worker's default device.
    """

    def __init__(
        self,
        pair: Pair,
        device: _Device,
        in_devices: tuple[_Device, ...],
        out_devices: tuple[_Device, ...],
    ) -> None:
        vars(self).update(vars(pair))
        self._pair, self.device = pair, device
        self.in_devices, self.out_devices = in_devices, out_devices

    @property
    def pair(self) -> Pair:
        """The pair without devices."""
        return self._pair

    def forward(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], Residuals | None]:
        """Run the function on its device; see `Pair.forward`."""
        with working_on(self.device):
            outputs, residuals = self.pair.forward(put(args, self.device))
        return spread(outputs, self.out_devices), residuals

    def vjp(
        self, residuals: Residuals, cotangents: Sequence[Sequence[Any]]
    ) -> tuple[Any, ...]:
        """Carry cotangents back, each to the device of its input; see `Pair.vjp`."""
        with working_on(self.device):
            here = [put(addends, self.device) for addends in cotangents]
            gradients = self.pair.vjp(residuals, here)
        return spread(gradients, self.in_devices)

    def __repr__(self) -> str:
        return f"{self.pair} on {self.device or 'the default device'}"


def spread(values: Sequence[Any], devices: Any) -> tuple[Any, ...]:
    """Put each value on its device."""
    both = zip(values, devices, strict=True)
    return tuple([put((value,), device)[0] for value, device in both])


def placed(
    pair: Pair,
    device: _Device,
    sources: Sequence[_Device],
    targets: Sequence[_Device] | None = None,
) -> Any:
    """Return a pair with devices; the pair itself if all are the default device.

    `sources` are where the arguments live, `targets` where the outputs go; None: all
    stay on the device.
    """
    out = (device,) * len(pair.out_avals) if targets is None else tuple(targets)
    if device is None and not any(sources) and not any(out):
        return pair
    return _placed(pair, device, tuple(compress(sources, pair.tracked)), out)


_placed = lru_cache(maxsize=PAIRS_MAX)(Placed)  # One for each, as there is one pair.
