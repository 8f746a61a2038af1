"""Where the `dglab` command starts: Ctrl-C is answered from here on, while `cli` and its libraries load, too."""

from __future__ import annotations

import os
import signal
import sys

from dglab_utils.runs import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED


def main() -> int:
    """Runs the command line; returns its exit status."""
    try:
        from dglab_utils.runs import cli

        status = cli.main()
        _leave_calmly()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of our output has gone (`dglab list | head`). What Python would still flush goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        _leave_calmly()
        print("dglab: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _leave_calmly() -> None:
    """All is done and the status known: another Ctrl-C would only kill the process while it ends, with status -2."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
