"""The optimizer of each parameter of a model: roles of parameters, rules, and parameter groups."""
