"""Cost of a plan on a machine: seconds of buckets, totals of ranks, and the timeline of a step."""
