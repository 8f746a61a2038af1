"""Timing: warm, paired, with its spread."""
