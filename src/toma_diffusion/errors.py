"""The error for mistakes that a user can correct."""


class UsageError(ValueError):
    """A wrong setting, model or file. The message says what is wrong and what to do about it.

    The command line prints its message alone. Every other error is printed with a traceback.
    """
