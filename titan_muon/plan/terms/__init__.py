"""Data types of a plan: layouts, pieces, matrices, buckets, schedules and machines."""
