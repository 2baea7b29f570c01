"""The error of a run that cannot go on."""


class RunFault(RuntimeError):
    """A run cannot go on, and every rank knows the reason. The text is one message, complete for printing."""
