"""Plans: a program is recorded once, cut into segments, and run by steps."""
