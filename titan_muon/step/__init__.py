"""Stages, features and arithmetic of a step."""
