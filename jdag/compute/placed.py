"""Device transfers around a pair, for calls on (or arrays of) named devices.

Transferring an argument to the call's device is a tracked identity: the vjp puts its
cotangent back on the device of the argument, so that all cotangents summed there are on
that device. The pair is shared, and JAX compiles it per device. Transfers are outside
of the pair, since JAX ignores them inside jit.

Invariant: an array that is stored for a device is on that device.
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
    """A pair with devices. It uses the compiled functions of `pair`.

    It computes on `device`; cotangents of the tracked inputs go to `in_devices`,
    outputs to `out_devices`. None is the worker's default device.
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
        return self._pair

    def forward(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], Residuals | None]:
        with working_on(self.device):
            outputs, residuals = self.pair.forward(put(args, self.device))
        return spread(outputs, self.out_devices), residuals

    def vjp(
        self, residuals: Residuals, cotangents: Sequence[Sequence[Any]]
    ) -> tuple[Any, ...]:
        with working_on(self.device):
            local = [put(addends, self.device) for addends in cotangents]
            gradients = self.pair.vjp(residuals, local)
        return spread(gradients, self.in_devices)

    def __repr__(self) -> str:
        return f"{self.pair} on {self.device or 'the default device'}"


def spread(values: Sequence[Any], devices: Any) -> tuple[Any, ...]:
    both = zip(values, devices, strict=True)
    return tuple([put((value,), device)[0] for value, device in both])


def placed(
    pair: Pair,
    device: _Device,
    sources: Sequence[_Device],
    targets: Sequence[_Device] | None = None,
) -> Any:
    """Return a pair with devices, or the pair itself if all devices are the default.

    The arguments are on `sources`; the outputs go to `targets`, or stay on `device` if
    `targets` is None.
    """
    out = (device,) * len(pair.out_avals) if targets is None else tuple(targets)
    if device is None and not any(sources) and not any(out):
        return pair
    return _placed(pair, device, tuple(compress(sources, pair.tracked)), out)


_placed = lru_cache(maxsize=PAIRS_MAX)(Placed)  # Cached, as pairs are.
