"""Training: optimizers, checkpoints, and recovery from the loss of workers."""
