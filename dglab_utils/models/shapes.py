"""Named shapes of DiffusionGemma, and models of those shapes with random weights.

A toy is the official class at a small size: same code, same sampler, weights drawn from a seed. What it does and
how it stops can be watched on any machine; what it says is noise.

The seven `toy-*` shapes are the first lab's (github.com/youdie006/diffusion-gemma-lab, experiments 01 and 02), met to
the parameter, so that its figures can be checked:

    toy-1m                                       experiment A: 1,000 tokens of vocabulary, 2 layers
    toy-69m                                      experiment C: vocabulary 32,768, 10 layers
    toy-17m toy-48m toy-97m toy-196m toy-336m    experiment D: the same at five widths

Any shape takes other experts, written `NAME:dense` (one expert, always chosen), `NAME:8/2` or `NAME:128/8`
(experts / chosen per token); the width of one expert stays, so more experts are more weights.

This module knows nothing of checkpoints (`loading`) nor of sampling.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DiffusionGemmaTextConfig

from dglab_utils.errors import LabError


@dataclass(frozen=True)
class Shape:
    """Sizes of one model. Lengths in tokens, widths in features.

    `experts` of `expert_width` each, of which a token uses `experts_per_token`, stand beside a dense MLP of
    `mlp_width` in every layer, as in the official decoder layer. `image_positions` sizes a table of the vision tower,
    which is never run here.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    experts: int
    experts_per_token: int
    expert_width: int
    vocab: int
    sliding_window: int = 128
    canvas_length: int = 256
    max_positions: int = 8192
    image_positions: int = 10240

    def config(self) -> DiffusionGemmaConfig:
        """The official configuration of this shape, with the first lab's one-layer vision tower (never run here)."""
        text = DiffusionGemmaTextConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp_width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            # Full-attention layers default to heads of 512; the toys have one size of head.
            global_head_dim=self.head_dim,
            num_global_key_value_heads=self.kv_heads,
            # Five sliding layers, one full, and a full one last: what the official class would force with a warning.
            layer_types=[
                "full_attention" if (i + 1) % 6 == 0 or i == self.layers - 1 else "sliding_attention"
                for i in range(self.layers)
            ],
            sliding_window=self.sliding_window,
            max_position_embeddings=self.max_positions,
            num_experts=self.experts,
            top_k_experts=self.experts_per_token,
            moe_intermediate_size=self.expert_width,
        )
        vision = {
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 14,
            "position_embedding_size": self.image_positions,
        }
        # The real model's image ids lie beyond a toy's vocabulary; its last three ids stand in.
        return DiffusionGemmaConfig(
            text_config=text,
            vision_config=vision,
            canvas_length=self.canvas_length,
            image_token_id=self.vocab - 1,
            boi_token_id=self.vocab - 2,
            eoi_token_id=self.vocab - 3,
        )

    def with_experts(self, experts: str) -> Shape:
        """This shape with `experts` = "dense" or "E/k", E experts of which a token uses k."""
        try:
            total, chosen = (1, 1) if experts == "dense" else (int(n) for n in experts.split("/"))
        except ValueError:
            raise LabError(f"experts {experts!r}: write 'dense' or 'E/k', such as 8/2") from None
        if not 1 <= chosen <= total:
            raise LabError(f"experts {experts!r}: a token uses between 1 and all {total} experts")
        return replace(self, name=f"{self.name}:{experts}", experts=total, experts_per_token=chosen)


def _sized(name: str, hidden: int) -> Shape:
    """One shape of the first lab's size sweep: heads, KV heads and expert width follow from the hidden size."""
    heads = max(2, hidden // 128 // 2 * 2)  # even, so that half as many KV heads divide them
    expert_width = max(32, hidden // 3 // 16 * 16)  # the grouped product wants multiples of 16
    return Shape(name, hidden, 10, heads, heads // 2, 64, 2 * hidden, 4, 2, expert_width, 32768)


SHAPES: dict[str, Shape] = {
    s.name: s
    for s in (
        Shape("toy-1m", 64, 2, 2, 1, 32, 128, 4, 2, 32, 1000),
        _sized("toy-17m", 256),
        _sized("toy-48m", 512),
        Shape("toy-69m", 768, 10, 2, 1, 32, 1536, 4, 2, 32, 32768),
        _sized("toy-97m", 768),
        _sized("toy-196m", 1152),
        _sized("toy-336m", 1536),
    )
}


def shape(name: str) -> Shape:
    """The shape called `name`, with or without `:EXPERTS`.

    Raises:
        LabError: no such shape.
    """
    base, _, experts = name.partition(":")
    if base not in SHAPES:
        near = difflib.get_close_matches(base, SHAPES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise LabError(f"no shape {base!r}: {hint}there are {', '.join(SHAPES)}, each also with :dense or :E/k")
    return SHAPES[base].with_experts(experts) if experts else SHAPES[base]


def build(
    name: str | Shape,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = torch.float32,
) -> DiffusionGemmaForBlockDiffusion:
    """A model of this shape with random weights, in evaluation mode.

    The weights are drawn on the CPU in float32 whatever the target, so that a seed names the same model on every
    device; the global random state is left as it was.

    Args:
        name: a name that `shape` knows, or a `Shape` of your own.
        seed: of the weights.
        device: where the model is put.
        dtype: a torch floating type or its name, such as "bfloat16".

    Raises:
        LabError: unknown shape, dtype or device.
    """
    wanted = name if isinstance(name, Shape) else shape(name)
    dtype, device = as_dtype(dtype), as_device(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DiffusionGemmaForBlockDiffusion(wanted.config())
    model.name_or_path = f"{wanted.name}@{seed}"
    # `from_pretrained` keeps the rotary frequencies in float32 at any dtype; a plain `.to(dtype)` would round them.
    rotary = [(m, n, b) for m in model.modules() for n, b in m.named_buffers(recurse=False) if n.endswith("inv_freq")]
    model.to(device=device, dtype=dtype)
    for module, buffer, frequencies in rotary:
        setattr(module, buffer, frequencies.to(device))
    return model.eval()


def count_parameters(name: str | Shape) -> int:
    """Parameters of the shape, tied ones once, without allocating any."""
    wanted = name if isinstance(name, Shape) else shape(name)
    with torch.device("meta"):
        return sum(p.numel() for p in DiffusionGemmaForBlockDiffusion(wanted.config()).parameters())


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """`dtype` as a torch floating type. Raises LabError when it is none."""
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise LabError(f"dtype {dtype!r}: use float32, bfloat16 or float16")
    return found


def as_device(device: str | torch.device) -> torch.device:
    """`device` as a torch device that exists here. Raises LabError when it does not."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise LabError(f"device {device!r}: use cpu, cuda, cuda:N or mps") from None
    there = (
        found.type == "cpu"
        or (found.type == "cuda" and (found.index or 0) < torch.cuda.device_count())
        or (found.type == "mps" and torch.backends.mps.is_available())
    )
    if not there:
        raise LabError(f"device {str(device)!r}: not on this machine; cpu always is")
    return found
