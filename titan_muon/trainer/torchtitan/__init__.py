"""Gaps of the installed TorchTitan, and its loader of Hugging Face text."""
