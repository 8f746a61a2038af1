"""Fixtures of the sampling tests; what they share lies in small.py."""

from __future__ import annotations

import pytest
import torch
from small import SMALL
from transformers import DiffusionGemmaForBlockDiffusion

from dglab_utils.models import build


@pytest.fixture(scope="session")
def model() -> DiffusionGemmaForBlockDiffusion:
    """Random weights, canvas 32, vocabulary 200, float32."""
    return build(SMALL)


@pytest.fixture(scope="session")
def prompts() -> torch.Tensor:
    """[3, 9] random token ids."""
    return torch.randint(2, 190, (3, 9), generator=torch.Generator().manual_seed(1))
