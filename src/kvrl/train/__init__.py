"""Training: configuration, warm start, the training step, checkpoints."""
