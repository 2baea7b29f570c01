"""Data types of a plan: intervals, pieces, matrices, buckets, and work. Without torch."""
