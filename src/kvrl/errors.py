"""The one exception type for mistakes that the user can mend."""


class KvrlError(ValueError):
    """A wrong field, file, model or combination: one line with field, value, limit and remedy.

    The command line prints it without a traceback and exits with code 2.
    """
