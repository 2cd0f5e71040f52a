"""What carries bytes between two processes: loop, streams, connections, identities."""
