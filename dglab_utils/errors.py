"""The one exception that a user is meant to read.

Everything a user can get wrong (a name, a value, a file) is raised as `LabError` with a single line that says
what is wrong, where, and what to do. The command line prints that line and exits with `exit_status`; notebooks
show it as an ordinary exception. Programming errors are not wrapped: they keep their traceback.
"""


class LabError(ValueError):
    """A mistake in what was asked for, told in one line.

    It is a `ValueError`, so that library callers need not know the class.
    """

    exit_status = 2
