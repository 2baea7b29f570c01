"""Errors of a run that cannot start or continue."""

from titan_muon.trainer.recipe import RecipeError


class RunFault(RuntimeError):
    """A run cannot continue. Raised on every rank; the text is a complete message."""


def unusable(folder: str, error: OSError) -> RecipeError:
    """Error for a start that cannot read or write in `dump_folder`."""
    remedy = "Free space, give this user the right to read and to write there, or set another dump_folder."
    return RecipeError(f"dump_folder = {folder!r}: {error}. {remedy}")
