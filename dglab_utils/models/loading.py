"""Checkpoints: a folder on this machine or an id on the Hugging Face Hub, through the official `from_pretrained`.

Weights are read from safetensors only, never from pickles, and code that a checkpoint brings along is not run unless
the caller says so.
"""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DiffusionGemmaForBlockDiffusion,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dglab_utils.errors import LabError
from dglab_utils.models.shapes import SHAPES, as_device, as_dtype, build
from dglab_utils.paths import MODELS

# Checkpoints that this repository holds, by name (`nano`).
TRAINED = {"nano": MODELS / "nano", "nano-young": MODELS / "nano-young"}


def load(
    source: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = torch.float32,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A model ready to generate: a named toy, a checkpoint folder, or a Hub id.

    Args:
        source: `toy-17m` and its like (random weights, seed 0), `nano` or `nano-young` (trained, in this
            repository), a folder with `config.json` and `*.safetensors`, or an id such as
            `google/diffusiongemma-26B-A4B-it`.
        device, dtype: where and in what precision the weights are put; "auto" keeps the precision that they are saved
            in.
        trust_remote_code: run Python code that the checkpoint carries. Off by default: it is arbitrary code.

    Returns:
        `DiffusionGemmaForBlockDiffusion` for a DiffusionGemma checkpoint, the causal language model that
        Transformers knows for any other.

    Raises:
        LabError: nothing there, no weights or not all, weights not in safetensors, remote code needed and not allowed,
            a gated model, no network; an encoder-decoder.
    """
    source = str(source)
    if source.partition(":")[0] in SHAPES:
        return build(source, device=device, dtype=torch.float32 if dtype == "auto" else dtype)
    dtype, device = "auto" if dtype == "auto" else as_dtype(dtype), as_device(device)
    name, source = source, str(TRAINED.get(source, source))
    _check_folder(source)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        diffusion = config.model_type == "diffusion_gemma"
        cls = DiffusionGemmaForBlockDiffusion if diffusion else AutoModelForCausalLM
        if config.is_encoder_decoder and not diffusion:
            raise LabError(f"{source}: an encoder-decoder; give a DiffusionGemma or a causal language model")
        asked = {} if diffusion else {"trust_remote_code": trust_remote_code}
        model, found = cls.from_pretrained(
            source, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **asked
        )
    except LabError:
        raise
    except SafetensorError as error:
        raise LabError(f"{source}: weights are damaged ({error}); download or save them again") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise LabError(
            f"{source}: config.json describes another shape than the weights have; take both from one place"
        ) from error
    except (OSError, ValueError, StrictDataclassError) as error:
        raise LabError(_told(source, error)) from error
    if missing := sorted(found["missing_keys"]):
        raise LabError(
            f"{source}: {len(missing)} weights are missing, such as {missing[0]}; they would be random numbers"
        )
    model.name_or_path = name  # what a trace or a result says was run; a folder of this machine tells nobody anything
    return model.to(device).eval()


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of the same checkpoint. Raises LabError like `load`; toys have none."""
    source = str(source)
    if source.partition(":")[0] in SHAPES:
        raise LabError(f"{source}: a toy with random weights has no tokenizer; give token ids")
    source = str(TRAINED.get(source, source))
    _check_folder(source, weights=False)
    files = ("tokenizer*", "vocab*", "*.model", "spiece*")
    if Path(source).is_dir() and not any(any(Path(source).glob(name)) for name in files):
        raise LabError(f"{source}: no tokenizer in this folder; put that of the checkpoint there")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise LabError(_told(source, error)) from error


def _check_folder(source: str, *, weights: bool = True) -> None:
    """Refuses, with its reason, a folder that cannot be a checkpoint; a Hub id passes."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        looks_local = source.startswith((".", "/", "~")) or source.count("/") != 1 or folder.exists()
        if looks_local:
            raise LabError(f"{source}: no such folder; give a toy's name, a checkpoint folder or a Hub id (owner/name)")
        return
    if not (folder / "config.json").is_file():
        raise LabError(f"{source}: no config.json in this folder; is it the checkpoint's top folder?")
    if weights and not any(folder.glob("*.safetensors")):
        others = [p.name for p in folder.glob("*.bin")] + [p.name for p in folder.glob("*.pt*")]
        found = f" (found {others[0]}, which is not read: convert it)" if others else ""
        raise LabError(f"{source}: no *.safetensors weights in this folder{found}; download or save them there")


def _told(source: str, error: Exception) -> str:
    """One line for what `from_pretrained` says in many."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return f"{source}: needs Python code from the checkpoint; read it, then pass trust_remote_code=True"
    if "gated" in text.lower() or "401" in text or "403" in text:
        return f"{source}: gated or private; accept its terms on its page and log in with `hf auth login`"
    if "safetensors" in text and "no file named" in text:
        return f"{source}: has no safetensors weights; other formats are not read"
    if "connect" in text.lower() or "offline" in text.lower() or "couldn't" in text.lower():
        return f"{source}: neither a folder here nor reachable on the Hub; check the name and the network"
    return f"{source}: cannot be loaded: {text[:300]}"
