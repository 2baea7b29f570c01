"""Everything that differs between TorchTitan's versions: an interface, and a module per version."""
