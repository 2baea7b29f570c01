"""What a model reads: documents from files, tokenizers, packed blocks, and the loaders that deal them out to ranks.

Batches depend on the seed and the global batch, not on the number of ranks.
"""
