"""Public names that have gone, and what to use in place of them."""

import sys

GONE = {
    "jdag.programs": "programs of scenarios are files beside their TOML file, such as "
    "scenarios/shapes.py; Case is jdag.scenario.Case",
    "jdag.rpc": "jdag worker and jdag up start workers; their modules are in "
    "jdag.processes",
}
# Settings of launch and keys of a cluster's file.
GONE_SETTINGS = {
    "carrier": "leave it out; sockets carry all data, gRPC is the control plane"
}


def gone(name: str) -> str:
    """Return the message of an error for a name of `GONE`, such as jdag.programs."""
    return f"{name} has gone: {GONE[name]}"


class _GoneModules:
    """Finder, asked last, which refuses to import modules of `GONE`."""

    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> None:
        """Raise ImportError for a module that has gone; find no other one."""
        del path, target
        if name in GONE:
            raise ImportError(gone(name))


sys.meta_path.append(_GoneModules)
