"""Assignment of parameters to optimizers, and the optimizers' container."""
