"""Plans: programs that are recorded once, split into segments, and run repeatedly."""
