"""The released model's shape with random weights, made where it will run.

`shapes.build` draws on the CPU in float32, so that a seed names one model everywhere. A model of 25 billion parameters
would need 100 GB for that. Here every parameter is allocated once, on the device and in the dtype asked for, and filled
there. What it computes is noise; what it costs is what the released weights cost, but for the routing: random routers
spread tokens evenly over the experts.

This module knows nothing of the toys' sizes nor of where the released sizes are written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DiffusionGemmaTextConfig

from dglab_utils.errors import LabError
from dglab_utils.models.shapes import as_device, as_dtype, shape

# Names of data/reference/model_shapes.yaml, and what the official configuration calls them.
SIZES = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "full_kv_heads": "num_global_key_value_heads",
    "full_head_dim": "global_head_dim",
    "mlp_width": "intermediate_size",
    "experts": "num_experts",
    "experts_per_token": "top_k_experts",
    "expert_width": "moe_intermediate_size",
    "vocab": "vocab_size",
    "sliding_window": "sliding_window",
}
COUNTS = ("sliding_layers", "full_layers", "canvas_length")


def config_of(sizes: Mapping[str, Any]) -> DiffusionGemmaConfig:
    """The official configuration of these sizes, named as in `data/reference/model_shapes.yaml`.

    Layers stand in the official order, five sliding ones and a full one in turn. The vision tower is the toys' (one
    layer): it takes no part in generating text.

    Raises:
        LabError: a size is missing.
    """
    if missing := [name for name in (*SIZES, *COUNTS) if name not in sizes]:
        raise LabError(f"sizes: {missing[0]} is missing; want {', '.join((*SIZES, *COUNTS))}")
    text = DiffusionGemmaTextConfig(
        num_hidden_layers=sizes["sliding_layers"] + sizes["full_layers"],
        **{official: sizes[name] for name, official in SIZES.items()},
    )
    full = text.layer_types.count("full_attention")
    if full != sizes["full_layers"]:
        raise LabError(f"sizes: {sizes['full_layers']} full layers; the official order gives {full} of as many layers")
    vision = shape("toy-1m").config().vision_config
    return DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=sizes["canvas_length"])


def scaled(sizes: Mapping[str, Any], divisor: int, *, layers: int | None = None) -> dict[str, Any]:
    """The same shape with every width, the vocabulary and the layers divided: a small copy with the same ratios.

    Experts, and how many of them a token uses, stay: they decide what share of the weights a token and a canvas touch.
    So do head widths, window and canvas. Layers come in the official sixes, expert widths in sixteens.

    Args:
        divisor: of widths; heads of each kind are divided too, as far as one of them.
        layers: instead of the divided number.

    Raises:
        LabError: a size is missing, or a divisor does not divide the widths.
    """
    if missing := [name for name in (*SIZES, *COUNTS) if name not in sizes]:
        raise LabError(f"sizes: {missing[0]} is missing; want {', '.join((*SIZES, *COUNTS))}")
    if divisor < 1 or any(sizes[name] % divisor for name in ("hidden", "mlp_width", "vocab")):
        raise LabError(f"divisor {divisor}: want one that divides widths and vocabulary, such as 2, 4, 8 or 16")
    whole = sizes["sliding_layers"] + sizes["full_layers"]
    sixes = max(1, round((whole / divisor if layers is None else layers) / 6))
    small = dict(sizes) | {"sliding_layers": 5 * sixes, "full_layers": sixes}
    for name in ("hidden", "mlp_width", "vocab"):
        small[name] = sizes[name] // divisor
    for name in ("heads", "kv_heads", "full_kv_heads"):
        small[name] = max(1, sizes[name] // divisor)
    small["expert_width"] = max(16, round(sizes["expert_width"] / divisor / 16) * 16)
    return small


def build_in_place(
    config: DiffusionGemmaConfig, *, seed: int = 0, device: str | torch.device = "cpu", dtype: torch.dtype | str
) -> DiffusionGemmaForBlockDiffusion:
    """A model of this configuration with random weights, in evaluation mode; needs no more memory than it keeps.

    The weights depend on the device: each draws differently from one seed. The global random states are left as they
    were.

    Raises:
        LabError: unknown dtype or device.
    """
    device, dtype = as_device(device), as_dtype(dtype)
    with torch.device("meta"):
        model = DiffusionGemmaForBlockDiffusion(config)
    made: dict[int, nn.Parameter] = {}  # tied weights are one parameter in several places, and must stay one
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                zeros = torch.zeros(parameter.shape, dtype=dtype, device=device)
                made[id(parameter)] = nn.Parameter(zeros, requires_grad=False)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module.named_buffers(recurse=False):
            # Rotary frequencies stay in float32 at any dtype, as `from_pretrained` keeps them.
            kept = buffer.dtype if name.endswith("inv_freq") or not buffer.is_floating_point() else dtype
            module._buffers[name] = torch.ones(buffer.shape, dtype=kept, device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        for part in (model.model.decoder, model.model.encoder.language_model):  # the vision tower stays zero
            part.apply(model._init_weights)
    model.name_or_path = f"{sum(p.numel() for p in made.values()):,} random parameters@{seed}"
    return model.eval()
