"""Storage of momentum and states of algorithms on the device or the host, and in state dicts."""
