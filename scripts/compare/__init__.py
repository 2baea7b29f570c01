"""What compare_runs.py reads and draws."""
