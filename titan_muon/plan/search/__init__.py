"""The search for a plan: owners, rounds, candidates, and the fastest of them."""
