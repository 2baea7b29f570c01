"""The error of a run that cannot continue."""


class RunFault(RuntimeError):
    """A run cannot continue. Raised on every rank; the text is a complete message."""
