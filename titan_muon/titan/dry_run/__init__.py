"""What training a recipe would do, shown without training: the model on the meta device, its plan and its memory."""
