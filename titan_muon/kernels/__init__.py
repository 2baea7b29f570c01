"""Triton kernels, and the measured choices between them."""
