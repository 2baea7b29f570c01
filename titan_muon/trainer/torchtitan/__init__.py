"""Gaps of the installed TorchTitan, its loader of Hugging Face text, and the forms of its optimizer slot."""
