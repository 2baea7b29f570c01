"""Recipes: tables of options from TOML and the command line.

Without imports of torch and torchtitan, so that errors and `--help` appear at once.
"""

from .constraints import as_recipe_errors, recipe_error
from .degrees import check_degrees
from .files import load, to_toml
from .sections import Recipe
from .toml import RecipeError

__all__ = ["Recipe", "RecipeError", "as_recipe_errors", "check_degrees", "load", "recipe_error", "to_toml"]
