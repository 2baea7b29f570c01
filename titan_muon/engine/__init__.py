"""The engine: it runs any plan."""
