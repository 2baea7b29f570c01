"""Dry run of a recipe without processes and devices: plan, memory and owners."""
