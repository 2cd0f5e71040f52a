"""Devices by name, as JAX has them, and all of them."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jdag.errors import JdagError
from jdag.parallel.devices import (
    check_platform,
    device_name,
    device_of,
    resolved_devices,
)
from tests.tools.error_texts import fails_with
from tests.unit.parallel.cases import names

D = tuple(jax.devices())


def test_names_and_devices_may_be_mixed_and_none_is_all():
    assert resolved_devices(["cpu:3", D[1]], "f") == (D[3], D[1])
    assert resolved_devices(None, "f") == D and len(D) == 8
    assert [device_name(device) for device in D] == names(8)
    assert [device_of(name, "f") for name in names(8)] == list(D)


def test_the_devices_of_a_mesh_are_taken_as_it_has_them():
    mesh: Any = Mesh(np.asarray(D[2:6]).reshape(2, 2), ("a", "b"))
    assert resolved_devices(mesh.devices.flat, "f") == D[2:6]
    assert resolved_devices(mesh.devices[1], "f") == D[4:6]
    with fails_with(JdagError, "parallel.dtype_object_allowed_are_a"):
        resolved_devices(mesh.devices, "f")


@pytest.mark.parametrize(
    ("said", "devices"),
    [
        (
            r"^f: the list of .* is empty; .* one or more of cpu:0, .*cpu:7, or None",
            [],
        ),
        (r"^f: device cpu:3 is listed twice$", ["cpu:3", "cpu:1", D[3]]),
        (r"^f: .* has no device 'cpu:8'; it has the .* cpu:0, .*cpu:7\.", ["cpu:8"]),
        (r"of other processes \(jax.devices\(\)\) after jax.distr", ["cpu:8"]),
        (r"^f: this process has no device 3", [3]),
        (
            r"'b/cpu:1' is a device of another worker.* ctx.call\('b', fn, ...\)",
            ["b/cpu:1"],
        ),
        (r"devices = 'cpu:1': expected a list of dev.* \['cpu:0', 'c", "cpu:1"),
        (r"devices = 3: expected a list", 3),
    ],
)
def test_what_is_no_device_of_this_process_is_said(said, devices):
    with pytest.raises(JdagError, match=said):
        resolved_devices(devices, "f")


def test_a_device_of_another_process_is_said_with_those_that_are_here(monkeypatch):
    far: Any = D[2]
    others = [device for device in D if device is not far]
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: others)
    with fails_with(JdagError, "parallel.belongs_to_process_0_and"):
        device_of(far, "f")


def test_devices_of_several_platforms_are_refused_by_their_names(
    monkeypatch: pytest.MonkeyPatch,
):
    other: Any = SimpleNamespace(platform="gpu", process_index=0)
    known = {"gpu": [other], "cpu": list(D)}
    monkeypatch.setattr(jax, "local_devices", lambda backend: known[backend])
    with fails_with(JdagError, "parallel.f_gpu_0_cpu_1"):
        check_platform([other, D[1]], "f")
    check_platform(D[:3], "f")
