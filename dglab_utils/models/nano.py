"""nano: the official class at a million parameters, with characters for tokens: a trained one fits in a repository.

    model, tokenizer = load("nano"), load_tokenizer("nano")
    prompts = batch_of(tokenizer, ["reverse abc=", "add 17+25="])
    output = model.generate(**prompts)
    answers(output.sequences[:, prompts["input_ids"].shape[1]:])        # ['cba', '042']

The shape keeps what the released model has: sliding and full attention layers, a dense MLP beside routed experts,
self-conditioning, tied embeddings, the capped LM head. A canvas holds 64 characters. What it is asked is in
`nano_tasks`; how it is trained in `nano_training`, which this module knows nothing of.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaGenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

from dglab_utils.errors import LabError
from dglab_utils.models.nano_tasks import ALPHABET
from dglab_utils.models.shapes import Shape, build

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
# The last three stand for images, as in every shape (`Shape.config`); nano never sees one.
VOCABULARY = [PAD, EOS, BOS, *ALPHABET, "<eoi>", "<boi>", "<image>"]
PAD_ID, EOS_ID, BOS_ID = range(3)
# What stands for a position not yet written, in the twin that is trained with masks: no answer holds it.
MASK_ID = BOS_ID
CANVAS = 64
# What attention can look back on: more than the longest sequence that is trained on, 181.
WINDOW = 256
LONGEST = WINDOW - 2 * CANVAS - 1  # characters of a prompt: beside BOS and the two canvases of an answer

NANO = Shape(
    name="nano",
    hidden=128,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    mlp_width=256,
    experts=8,
    experts_per_token=2,
    expert_width=32,
    vocab=len(VOCABULARY),
    sliding_window=WINDOW,
    canvas_length=CANVAS,
    max_positions=2 * WINDOW,
    image_positions=16,
)


def build_nano(shape: Shape = NANO, *, seed: int = 0) -> DiffusionGemmaForBlockDiffusion:
    """An untrained model of this shape, on the CPU in float32, that generates with the official default settings."""
    model = build(shape, seed=seed)
    model.config.text_config.pad_token_id = PAD_ID
    model.config.text_config.eos_token_id = EOS_ID
    model.config.text_config.bos_token_id = BOS_ID
    defaults = DiffusionGemmaGenerationConfig._get_default_generation_params()
    assert isinstance(defaults["sampler_config"], EntropyBoundSamplerConfig)
    # Two canvases: the longest answer of the tasks.
    model.generation_config = DiffusionGemmaGenerationConfig(
        **defaults | {"max_new_tokens": 2 * CANVAS},
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return model


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, BOS in front; padding on the left, as the encoder wants it."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    core = Tokenizer(models.WordLevel(ids))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        padding_side="left",
        model_max_length=2 * WINDOW,
        clean_up_tokenization_spaces=False,
    )


def batch_of(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, `[B, longest]` each, padded on the left: what `generate()` takes.

    Raises:
        LabError: no prompt, an empty one, one with characters that nano does not know, or one that is too long.
    """
    if not prompts:
        raise LabError("nano: no prompts given")
    known = set(ALPHABET)
    for prompt in prompts:
        if not prompt:
            raise LabError("nano: an empty prompt; ask something, such as 'sort cab='")
        if unknown := sorted(set(prompt) - known):
            raise LabError(f"nano: prompt {prompt!r} has {unknown[0]!r}; it knows {ALPHABET!r} only")
        if len(prompt) > LONGEST:
            raise LabError(f"nano: a prompt of {len(prompt)} characters; it reads {LONGEST} at most")
    encoded = tokenizer(list(prompts), return_tensors="pt", padding=True, return_token_type_ids=False)
    return {name: tensor.to(device) for name, tensor in encoded.items()}


def check_is_nano(model: DiffusionGemmaForBlockDiffusion) -> None:
    """Raises LabError for a model of another vocabulary or canvas: its ids would be read as other characters."""
    there = model.config.get_text_config().vocab_size, getattr(model.config, "canvas_length", None)
    if there != (NANO.vocab, CANVAS):
        raise LabError(
            f"{model.name_or_path}: not a nano: vocabulary and canvas are {there[0]} and {there[1]}, "
            f"want {NANO.vocab} and {CANVAS}"
        )


def answers(generated: Tensor) -> list[str]:
    """Text of each row of new tokens, `[B, T]`, up to the first EOS; the whole row where there is none."""
    rows = []
    for row in generated.tolist():
        kept = row[: row.index(EOS_ID)] if EOS_ID in row else row
        rows.append("".join(VOCABULARY[token] for token in kept))
    return rows
