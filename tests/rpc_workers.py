"""Worker processes that serve one cluster after another, so that tests need few.

They compute where the variable JDAG_DEVICE says, such as gpu:0.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jdag
from jdag.drivers import worker_options
from jdag.rpc.launch import Launch
from tests.rpc_cases import free_address

ALLOWED = ("tests",)


class Workers:
    """Processes for all workers but the first, which is whoever connects.

    Args:
        names: of all workers.
        carrier: "socket" or "grpc".
        allow: modules whose functions may be named.
        env: variables of the environment for the workers.
        deadline_s: of the cluster.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        carrier: str = "socket",
        allow: Sequence[str] = ALLOWED,
        env: Mapping[str, str] | None = None,
        deadline_s: float = 10.0,
    ) -> None:
        self.names = tuple(names)
        options = [
            worker_options(
                name,
                carrier=carrier,
                device=os.environ.get("JDAG_DEVICE"),
                allow=allow,
                value_bytes_max=1 << 34,
            )
            for name in self.names[1:]
        ]
        self.launch = Launch(options, env=env)
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / "cluster.toml"
        lines = [f'carrier = "{carrier}"', f"deadline_s = {deadline_s}"]
        allowed = ", ".join(f'"{module}"' for module in allow)
        for name in self.names:
            address = self.launch.addresses.get(name) or free_address()
            lines += [
                f"[workers.{name}]",
                f'control = "{address}"',
                f"allow = [{allowed}]",
            ]
        self.path.write_text("\n".join(lines), encoding="utf-8")

    @property
    def alive(self) -> bool:
        """Whether all of them live."""
        return len(self.launch.alive) == len(self.names) - 1

    def connect(self) -> Any:
        """Return a new cluster over them; its main program runs here."""
        return jdag.connect(self.path, name=self.names[0])

    def close(self) -> None:
        """End them."""
        self.launch.close()
        self._folder.cleanup()
