"""Measurements with their spread."""

from dglab_utils.measure.records import Measurement

__all__ = ["Measurement"]
