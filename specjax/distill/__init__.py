"""Training a draft toward its target: losses, data, the pure step, checkpoints, evaluation by the decoder."""
