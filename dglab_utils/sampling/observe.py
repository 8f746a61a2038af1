"""`observe`: watch the untouched `generate()` denoise.

    with observe(model, seed=0) as traces:
        output = model.generate(prompt, return_dict_in_generate=True)

`generate()` asks the model for its sampler, stop test and temperature schedule through `_prepare_*` methods. Inside the
context those methods return the instruments, which are the official classes with a window (`instruments`). Nothing of
the loop is copied or changed: with the same seed, a traced run returns the untraced run's tokens bit for bit.

After each canvas, one `CanvasTrace` a row is appended to the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList, PreTrainedModel, StaticCache
from transformers.models.diffusion_gemma.generation_diffusion_gemma import LinearTemperatureScheduleLogitsProcessor

from dglab_utils.errors import LabError
from dglab_utils.sampling.hooks import replaced
from dglab_utils.sampling.instruments import (
    ObservedCap,
    ObservedSampler,
    ObservedSchedule,
    ObservedStop,
    StepRecorder,
)
from dglab_utils.sampling.noise import RowNoiseSampler, sampler_settings
from dglab_utils.sampling.trace import CanvasTrace


class ObservedRowNoiseSampler(RowNoiseSampler, ObservedSampler):
    """Draws a row's noise from its own generator, then is observed: what is noted are the candidates really used."""


@contextmanager
def observe(
    model: PreTrainedModel,
    *,
    seed: int | None = None,
    row_seeds: Sequence[int] | None = None,
    keep_logits: bool = False,
) -> Iterator[list[CanvasTrace]]:
    """Inside, every `model.generate()` adds its canvases to the list that the context yields.

    Args:
        model: a `DiffusionGemmaForBlockDiffusion` with the dynamic cache (the default). A compiled loop (a static
            cache) runs as one graph that nothing can look into.
        seed: seeds PyTorch's global generator on entry and is written into the traces.
        row_seeds: one a row; draws each row's noise from a generator of its own (`noise`). Changes the draws, on
            purpose, but not what is computed from them.
        keep_logits: keep the tempered logits, `[S, L, V]` float32 a trace: 50 MB for 48 steps of a vocabulary of
            1,000, 13 GB for the real one.

    Yields:
        The traces, in the order canvas by canvas, row by row.

    Raises:
        LabError: not a DiffusionGemma model; contexts nested on one model; a compiled loop; and, out of `generate()`,
            an empty prompt, one that leaves no room to generate, logits that are NaN or wholly -inf.
    """
    traces: list[CanvasTrace] = []
    hooks = _Hooks(model, traces, seed, row_seeds, StepRecorder(keep_logits=keep_logits))
    if seed is not None:
        torch.manual_seed(seed)
    with replaced(model, **hooks.methods()), hooks.recorder.explaining():
        yield traces


class _Hooks:
    """The `_prepare_*` methods of one model while it is observed; each calls the official one or its observed twin."""

    def __init__(
        self,
        model: PreTrainedModel,
        traces: list[CanvasTrace],
        seed: int | None,
        row_seeds: Sequence[int] | None,
        recorder: StepRecorder,
    ):
        self.model, self.official = model, type(model)
        self.traces, self.seed, self.row_seeds, self.recorder = traces, seed, row_seeds, recorder
        self.prompts: list[np.ndarray] = []
        self.settings: dict[str, Any] = {}
        self.canvas = 0

    def methods(self) -> dict[str, Any]:
        names = (
            "_prepare_generated_length",
            "_prepare_sampler",
            "_prepare_logits_processor",
            "_prepare_diffusion_stopping_criteria",
            "_prepare_encoder_inputs",
            "_prepare_denoiser_inputs",
            "_finalize_canvas",
            "_compile_functions",
        )
        return {name: getattr(self, name.removeprefix("_")) for name in names}

    # -- once a call of generate() ---------------------------------------------------------------------------

    def prepare_generated_length(self, generation_config: Any, cur_len: int) -> tuple[int, int]:
        if cur_len == 0:
            raise LabError("input_ids: the prompt is empty; give at least one token (a BOS will do)")
        max_length, max_new_tokens = self.official._prepare_generated_length(self.model, generation_config, cur_len)
        if max_new_tokens <= 0:
            raise LabError(
                f"input_ids: a prompt of {cur_len} tokens leaves no room under max_length={max_length}; "
                "raise max_length or give max_new_tokens"
            )
        positions = self.model.config.text_config.max_position_embeddings
        if cur_len + self.model.config.canvas_length > positions:
            raise LabError(
                f"input_ids: a prompt of {cur_len} tokens and a canvas of {self.model.config.canvas_length} pass the "
                f"model's {positions} positions; shorten the prompt"
            )
        return max_length, max_new_tokens

    def prepare_sampler(self, generation_config: Any) -> ObservedSampler:
        self.canvas, self.prompts = 0, []
        self.settings = {
            name: getattr(generation_config, name)
            for name in (
                "max_denoising_steps",
                "t_min",
                "t_max",
                "stability_threshold",
                "confidence_threshold",
                "pad_token_id",
                "eos_token_id",
            )
        }
        self.settings["entropy_bound"] = generation_config.sampler_config.entropy_bound
        self.settings["vocab_size"] = self.model.config.text_config.vocab_size
        arguments = sampler_settings(self.model, generation_config)
        if self.row_seeds is None:
            return ObservedSampler(recorder=self.recorder, **arguments)
        return ObservedRowNoiseSampler(row_seeds=self.row_seeds, recorder=self.recorder, **arguments)

    def prepare_logits_processor(self, generation_config: Any, logits_processor: Any = None) -> Any:
        official = self.official._prepare_logits_processor(self.model, generation_config, logits_processor)
        # A list of our own: the official method returns the caller's, with its schedule appended for good.
        processors = LogitsProcessorList(official)
        if processors and isinstance(schedule := processors[-1], LinearTemperatureScheduleLogitsProcessor):
            processors[-1] = ObservedSchedule(
                self.recorder,
                t_min=schedule.t_min,
                t_max=schedule.t_max,
                max_denoising_steps=schedule.max_denoising_steps,
            )
        return processors

    def prepare_diffusion_stopping_criteria(self, generation_config: Any) -> ObservedStop | ObservedCap:
        if self.official._prepare_diffusion_stopping_criteria(self.model, generation_config) is None:
            return ObservedCap(self.recorder)
        return ObservedStop(
            self.recorder,
            stability_threshold=generation_config.stability_threshold,
            confidence_threshold=generation_config.confidence_threshold,
        )

    def compile_functions(self, *_: Any, **__: Any) -> Any:
        raise LabError("a compiled loop cannot be observed: use the dynamic cache, or give disable_compile=True")

    # -- once a canvas ---------------------------------------------------------------------------------------

    def prepare_encoder_inputs(self, **kwargs: Any) -> tuple:
        ids, cache = kwargs["input_ids"], kwargs["cache" if "cache" in kwargs else "past_key_values"]
        if kwargs["is_prefill"]:
            mask = kwargs["attention_mask"][:, -ids.shape[1] :]
            self.prompts = [row[keep].int().cpu().numpy() for row, keep in zip(ids, mask, strict=True)]
            # A dynamic cache grows; its "maximum" is the sliding window of some layers, which simply slides.
            if isinstance(cache, StaticCache):
                room = cache.get_max_length() if hasattr(cache, "get_max_length") else cache.get_max_cache_shape()
                if room < ids.shape[1]:
                    raise LabError(f"cache: holds {room} tokens, the prompt has {ids.shape[1]}; give a longer cache")
        return self.official._prepare_encoder_inputs(self.model, **kwargs)

    def prepare_denoiser_inputs(self, **kwargs: Any) -> tuple:
        self.recorder.begin_canvas()
        if self.row_seeds is not None:
            kwargs["sampler"].begin_canvas(kwargs["device"])
        return self.official._prepare_denoiser_inputs(self.model, **kwargs)

    def finalize_canvas(self, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ended_before = kwargs["finished_sequences"].tolist()
        input_ids, finished_sequences = self.official._finalize_canvas(**kwargs)
        outputs = input_ids[:, -kwargs["canvas_length"] :].int().cpu().numpy()
        self.traces.extend(
            CanvasTrace(
                **arrays,
                output=outputs[row],
                prompt=self.prompts[row],
                settings=dict(self.settings),
                row=row,
                canvas=self.canvas,
                ended_before=ended_before[row],
                seed=self.seed if self.row_seeds is None else self.row_seeds[row],
                model=self.model.name_or_path,
                dtype=str(self.model.dtype).removeprefix("torch."),
                device=str(self.model.device),
            )
            for row, arrays in enumerate(self.recorder.take_rows())
        )
        self.canvas += 1
        return input_ids, finished_sequences
