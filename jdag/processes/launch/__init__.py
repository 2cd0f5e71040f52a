"""Start of worker processes (local, Slurm, Ray), and both sides of a session."""
