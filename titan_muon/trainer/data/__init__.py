"""Data of a model: documents, tokenizers, packed blocks and loaders, independent of the number of ranks."""
