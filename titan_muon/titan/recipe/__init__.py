"""Recipes: tables of options from TOML and the command line.

Imports neither torch nor torchtitan, so that errors and `--help` appear at once.
"""

from .constraints import recipe_error
from .degrees import check_degrees
from .files import Difference, differences, load, to_toml
from .sections import Recipe
from .toml import RecipeError

__all__ = [
    "Difference",
    "Recipe",
    "RecipeError",
    "check_degrees",
    "differences",
    "load",
    "recipe_error",
    "to_toml",
]
