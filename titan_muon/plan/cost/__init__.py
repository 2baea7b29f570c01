"""The cost of a plan on a machine: times of buckets, totals of ranks, and the timeline of a step."""
