"""Where the `dglab` command starts: Ctrl-C is answered from here on, while `cli` and its libraries load, too."""

from __future__ import annotations

import sys

from dglab_utils.runs import EXIT_INTERRUPTED


def main() -> int:
    """Runs the command line; returns its exit status."""
    try:
        from dglab_utils.runs import cli

        return cli.main()
    except KeyboardInterrupt:
        print("dglab: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
