"""One training script for each framework, with Hybrid as its optimizer. Each trains a small model on random tokens."""
