"""The `dglab` command: execution of notebooks and publishing them as pages."""

EXIT_INTERRUPTED = 130  # what a shell reports of a program that SIGINT ended
EXIT_BROKEN_PIPE = 141  # likewise of SIGPIPE
