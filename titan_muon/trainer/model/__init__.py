"""Changes of a TorchTitan model before training: attention, parallelization, owned matrices."""
