"""Programs for a single GPU: one rank of a large world, Muon beside AdamW, and float16."""
