"""The exception for mistakes that the user can mend, and the one of them after which a run can go on."""


class KvrlError(ValueError):
    """A wrong field, file, model or combination: one line with field, value, limit and remedy.

    The command line prints it without a traceback and exits with code 2.
    """


class RewardError(KvrlError):
    """The rewards of a rollout batch could not be had: no weight has changed since the step before."""
