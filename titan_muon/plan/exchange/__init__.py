"""Exchange patterns: which collectives carry a bucket, and what each rank packs into its buffers."""
