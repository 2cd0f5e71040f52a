"""What trains: optimizers, checkpoints, recovery from losses."""
