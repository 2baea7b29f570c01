"""Reading and drawing for compare_runs.py."""
