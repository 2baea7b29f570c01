"""The recipe: tables of options, read from TOML and the command line, checked once.

Imports neither torch nor torchtitan, so that a mistake and `--help` answer at once.
"""

from .recipe import Difference, Recipe, RecipeError, check_degrees, differences, load, to_toml

__all__ = ["Difference", "Recipe", "RecipeError", "check_degrees", "differences", "load", "to_toml"]
