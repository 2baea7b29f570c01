"""A run of a recipe: trainer, run folder, checkpoints, metrics, console and signals."""
