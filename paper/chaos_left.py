"""What this process holds open, and which ends its sockets are; for `paper.chaos`."""

import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

# Of sockets of TCP, in the tables of Linux.
LOOPBACK = "0100007F"
STATES = {"01": "ESTABLISHED", "02": "SYN_SENT", "08": "CLOSE_WAIT", "0A": "LISTEN"}


def opened() -> list[str]:
    """What the descriptors of this process are."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # The one of the folder itself.
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def kinds(found: list[str]) -> Counter[str]:
    """How many there are of each kind of descriptor."""
    return Counter(re.sub(r"[0-9]+", "N", one) for one in found)


def ends() -> dict[str, str]:
    """The ends of each socket, by what `opened` says of it."""
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
