"""Storage of momentum and rule states on the device or the host, and in state dicts."""
