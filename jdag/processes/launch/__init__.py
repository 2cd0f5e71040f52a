"""Where processes begin: launched, by Slurm, by Ray; and both sides of a session."""
