"""The engine: it runs any plan. Read engine.py, then step/step.py."""
