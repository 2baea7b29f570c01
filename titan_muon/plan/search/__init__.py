"""Search for the fastest plan: owners, rounds and candidates."""
