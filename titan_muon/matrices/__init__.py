"""The matrices of a parameter, from which the engine makes a plan."""
