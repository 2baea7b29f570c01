"""A run of a recipe: the trainer, its folder, checkpoints, metrics, and how it ends."""
