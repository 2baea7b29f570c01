"""Fake GPUs: CUDA tensors of full size without memory, in torch's fake process group, and counts of their operators."""
