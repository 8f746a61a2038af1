"""The `dglab` command: execution of notebooks and publishing them as pages."""
