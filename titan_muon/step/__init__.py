"""The stages of a step on this rank's tensors."""
