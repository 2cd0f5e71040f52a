"""Byte transport between processes: event loop, streams, connections, identities."""
