"""Public names that were removed, and what to use instead of them."""

import sys

GONE = {
    "jdag.programs": "programs of scenarios are files next to their TOML file, such as "
    "scenarios/shapes.py; Case is jdag.scenario.Case",
    "jdag.rpc": "jdag worker and jdag up start workers; their modules are in "
    "jdag.processes",
}
# Settings of `launch`, keys of cluster files and options of commands.
GONE_SETTINGS = {
    "carrier": "leave it out; sockets carry all data, gRPC is the control plane"
}


def removal_message(name: str) -> str:
    return f"{name} was removed: {GONE[name]}"


class _GoneModules:
    """The last import finder: refuses to import modules in `GONE`."""

    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> None:
        del path, target
        if name in GONE:
            raise ImportError(removal_message(name))


sys.meta_path.append(_GoneModules)
