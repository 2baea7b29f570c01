"""Data of a model: documents, tokenizers, packed blocks and loaders.

Batches depend on the seed and the global batch, not on the number of ranks.
"""
