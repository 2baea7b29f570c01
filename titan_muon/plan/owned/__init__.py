"""Where owned parameters are stored, and what a pass of the model sends because of it."""
