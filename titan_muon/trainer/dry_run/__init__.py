"""Dry run of a recipe without processes or devices: plan, memory, owners and verdict."""
