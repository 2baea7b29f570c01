"""Options that wrap the stages of a step: one file each, which can be deleted alone."""
