"""Tests of pages; a package, so that its modules may share names with those of the tests beside it."""
