"""Reading a saved model, for sample.py and evaluate.py."""
