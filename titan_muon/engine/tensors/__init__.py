"""A parameter on this rank: its layout, its matrices and its storage."""
