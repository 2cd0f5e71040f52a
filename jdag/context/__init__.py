"""One context: its calls, refs, leaves, passes, and the programs that run in it."""
