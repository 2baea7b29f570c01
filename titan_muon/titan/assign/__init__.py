"""Which optimizer takes which parameter of a model, and the container of these optimizers."""
