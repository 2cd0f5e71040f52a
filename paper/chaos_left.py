"""Lists the open descriptors and sockets of this process, for `paper.chaos`."""

import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

# 127.0.0.1 as /proc/self/net/tcp writes it.
LOOPBACK = "0100007F"
STATES = {"01": "ESTABLISHED", "02": "SYN_SENT", "08": "CLOSE_WAIT", "0A": "LISTEN"}


def opened() -> list[str]:
    """Return the target of each open descriptor, such as 'socket:[123]' or a path."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # `listdir` also lists its own, closed descriptor.
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def kinds(found: list[str]) -> Counter[str]:
    """Count descriptors by target. Numbers in targets are ignored."""
    return Counter(re.sub(r"[0-9]+", "N", one) for one in found)


def ends() -> dict[str, str]:
    """Map each socket, named as by `opened`, to its addresses and state."""
    found = {}
    for table in ("tcp", "tcp6", "unix"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                row = line.split()
                if table == "unix" and len(row) > 6:
                    text = f"type {row[4]} {' '.join(row[7:]) or 'unnamed'}"
                    found[f"socket:[{row[6]}]"] = f"unix {text}"
                elif table != "unix" and len(row) > 9:
                    local, peer = (
                        f"{'127.0.0.1' if host[-8:] == LOOPBACK else host}:"
                        f"{int(port, 16)}"
                        for host, port in (one.split(":") for one in row[1:3])
                    )
                    state = STATES.get(row[3], row[3])
                    found[f"socket:[{row[9]}]"] = f"{table} {local} -> {peer} {state}"
    return found
