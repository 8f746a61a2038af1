"""What is run: named shapes with random weights, and checkpoints from a folder or the Hub."""

from dglab_utils.models.loading import load, load_tokenizer
from dglab_utils.models.shapes import SHAPES, Shape, build, count_parameters, shape

__all__ = ["SHAPES", "Shape", "build", "count_parameters", "load", "load_tokenizer", "shape"]
