"""Encoding of functions, by name or as StableHLO, and the receiver's allowlist."""
