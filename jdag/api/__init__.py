"""What users hold: clusters, contexts, refs, leaves, optimizers, checkpoints."""
