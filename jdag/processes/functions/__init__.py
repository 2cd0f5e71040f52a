"""How functions travel: by name or as StableHLO, and what a receiver allows."""
