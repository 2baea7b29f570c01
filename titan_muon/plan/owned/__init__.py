"""Owners of owned parameters, and their loads."""
