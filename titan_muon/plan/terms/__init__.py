"""The nouns of a plan: layouts, pieces, matrices, buckets, schedules and machines."""
