"""Exchange patterns: the collectives of a bucket, and the content of each rank's buffers."""
