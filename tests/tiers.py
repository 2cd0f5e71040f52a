"""The two tiers of tests: every fact once, and all.

`JDAG_TIER=first` leaves out tests that are marked `second` and draws fewer programs;
without it all is run but tests that are marked `long`.
"""

import os

TIER = os.environ.get("JDAG_TIER", "all")
assert TIER in ("first", "all"), f"JDAG_TIER = {TIER!r}: allowed is first, all"
FIRST = TIER == "first"


def sized(first: int, whole: int) -> int:
    """Return how many to try: in the first tier, and in both together."""
    return first if FIRST else whole
