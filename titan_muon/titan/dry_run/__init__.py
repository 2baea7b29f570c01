"""What a recipe would do, without processes and devices: its plan, its memory and its owners."""
