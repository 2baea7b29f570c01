"""Reading a saved model, for sample.py, evaluate.py and export.py."""
