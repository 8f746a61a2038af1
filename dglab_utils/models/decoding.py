"""Two ways to decode with the same weights, one step at a time, so that a step can be timed by itself.

    TokenStepper     autoregressive: the encoder reads one token with the cache, LM head, cap, draw the next token
    CanvasStepper    block diffusion: one denoising step of `generate()` on a canvas of 256 positions

A step is cut at the same places in both:

    body      the layers alone: hidden states out. Canvas: self-conditioning included
    forward   the body, LM head and the cap 30 tanh(x / 30): logits out, float32
    step      the forward and all that leads to the next input. Token: softmax and a draw. Canvas: temperature,
              softmax, draw, argmax, accept, renoise, stop test, logits kept for self-conditioning

`mark()` notes a state and `rewind()` returns to it, so that every timed step does the same work on the same numbers.
Nothing of the official code is copied: the canvas step is `_denoising_step` itself, between the `_prepare_*` methods
that `generate()` calls. `compiled` compiles what `generate(cache_implementation="static")` compiles, over a static
cache; the autoregressive step is compiled likewise, with the same encoder.

Prompts of a batch have one length; there is no padding here. This module knows nothing of clocks.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DynamicCache, StaticCache

from dglab_utils.errors import LabError
from dglab_utils.models.shapes import as_dtype

# A mean entropy is never below this: not even zero is, and the official settings refuse a threshold of zero.
NEVER = sys.float_info.min
# Buffers of batch x canvas x vocabulary in float32 that a denoising step holds at its peak (transformers 5.24.0,
# counted with `measure.timing.peak_memory`).
VOCABULARY_BUFFERS = 8
# Activations of batch x tokens x widest layer in float32 that live at once, from above.
ACTIVATION_BUFFERS = 16


class TokenStepper:
    """Autoregressive decoding, a token a step.

    Attributes:
        token: `[B, 1]`, the input of the next step.
        length: tokens in the cache.
    """

    def __init__(
        self,
        model: DiffusionGemmaForBlockDiffusion,
        prompt: Tensor,
        *,
        temperature: float = 1.0,
        compiled: bool = False,
        room: int = 256,
    ):
        """Reads all of the prompt but its last token, which is the first step's input.

        Args:
            prompt: `[B, P]` token ids, P at least 2.
            temperature: of the draw; 0 takes the most likely token.
            compiled: static cache and `torch.compile`.
            room: tokens beyond the prompt that a static cache has room for.
        """
        _check_prompt(model, prompt, at_least=2)
        if temperature < 0:
            raise LabError(f"temperature {temperature}: want 0 (most likely token) or more")
        self.model, self.temperature = model, temperature
        self.cache = _cache(model, prompt.shape[1] + room if compiled else None)
        self.encoder, self.head = model.model.encoder, self._head
        self.length = 0
        self.token = prompt[:, :-1]
        self.body()  # a prefill is never compiled, as in generate()
        self.token = prompt[:, -1:]
        if compiled:
            self.encoder = _compiled_encoder(model)
            self.head = torch.compile(self._head, mode="reduce-overhead", fullgraph=True)
        self.mark()

    @torch.no_grad()
    def body(self) -> Tensor:
        """`[B, n, hidden]` of the n input tokens, which the cache now holds too."""
        count = self.token.shape[1]
        positions = torch.arange(self.length, self.length + count, dtype=torch.int32, device=self.token.device)[None]
        unread, masks = self.model._prepare_encoder_inputs(
            input_ids=self.token,
            attention_mask=None,
            encoder_position_ids=positions,
            cache=self.cache,
            is_prefill=False,
            canvas_length=count,
            batch_size=self.token.shape[0],
        )
        read = self.encoder(input_ids=unread, attention_mask=masks, cache=self.cache, position_ids=positions)
        self.length += count
        return read.last_hidden_state

    @torch.no_grad()
    def forward(self) -> Tensor:
        """`[B, V]` logits of the next token, float32."""
        return self.head(self.body())

    @torch.no_grad()
    def step(self) -> Tensor:
        """`[B]` the next token, which becomes the next step's input."""
        logits = self.forward()
        if self.temperature == 0:
            drawn = logits.argmax(dim=-1, keepdim=True)
        else:
            drawn = torch.multinomial(torch.softmax(logits / self.temperature, dim=-1), num_samples=1)
        self.token = drawn
        return drawn.squeeze(-1)

    def mark(self) -> None:
        """Notes the state that `rewind` returns to."""
        self._marked = (self.token, self.length, _layers_of(self.cache))

    def rewind(self) -> None:
        """Returns to the marked state: the same token, over the same context."""
        self.token, self.length, layers = self._marked
        _restore(self.cache, layers)

    def _head(self, hidden: Tensor) -> Tensor:
        """`[B, V]` capped logits of the last position, as the official forward computes them."""
        cap = self.model.final_logit_softcapping
        return torch.tanh(self.model.lm_head(hidden[:, -1]).to(torch.float32) / cap) * cap


class CanvasStepper:
    """Block diffusion, a denoising step a step, on one canvas behind a prompt.

    Attributes:
        canvas: `[B, L]`, the input of the next step.
        argmax: `[B, L]`, the best guess of the step before; what `generate()` would return.
        finished: `[B]`, rows that the stop test has ended.
        remaining: steps until the cap.
        length: tokens in the cache.
    """

    def __init__(
        self,
        model: DiffusionGemmaForBlockDiffusion,
        prompt: Tensor,
        *,
        adaptive: bool = False,
        compiled: bool = False,
        **settings: Any,
    ):
        """Reads the prompt and draws the first canvas, from the global generator as `generate()` does.

        Args:
            prompt: `[B, P]` token ids.
            adaptive: let the stop test end rows. Otherwise it is computed and never holds: fixed work.
            compiled: static cache and `torch.compile`, of what `generate()` compiles.
            settings: of `generate()`, such as `max_denoising_steps=48`.
        """
        _check_prompt(model, prompt, at_least=1)
        self.model, self.prompt, self.compiled = model, prompt, compiled
        if not adaptive:
            settings["confidence_threshold"] = NEVER
        try:
            config, others = model._prepare_generation_config(None, **settings)
        except (ValueError, AttributeError) as error:  # upstream's own refusals fail with the latter
            raise LabError(f"settings {settings}: {' '.join(str(error).split())}") from error
        if others:
            raise LabError(f"settings: no setting {next(iter(others))!r} of generate()")
        self.steps: int = config.max_denoising_steps
        self.sampler = model._prepare_sampler(config)
        self.processors = model._prepare_logits_processor(config)
        self.stop = model._prepare_diffusion_stopping_criteria(config)
        self.decoder, self.encoder = model.forward, model.model.encoder
        if compiled:
            # Kept on the model between calls, the first sampler's methods would stand in for this one's.
            for stale in ("_compiled_accept_canvas", "_compiled_renoise_canvas"):
                vars(model).pop(stale, None)
            self.encoder, self.decoder, self.sampler, self.stop = model._compile_functions(self.sampler, self.stop)
        self.prefill()
        self.begin()

    @torch.no_grad()
    def prefill(self) -> None:
        """Reads the prompt into a new cache: what comes before the first step, in either way of decoding."""
        whole = self.prompt.shape[1] + self.model.config.canvas_length
        self.cache = _cache(self.model, whole if self.compiled else None)
        self.length = 0
        self._read(self.prompt, self.model.model.encoder)

    @torch.no_grad()
    def begin(self) -> None:
        """Draws a new canvas behind what the cache holds."""
        batch, length = self.prompt.shape[0], self.length
        canvas, device = self.model.config.canvas_length, self.prompt.device
        self.canvas, self.conditioning, self.masks, self.finished = self.model._prepare_denoiser_inputs(
            decoder_attention_mask=torch.ones(batch, length + canvas, dtype=torch.bool, device=device),
            cache=self.cache,
            sampler=self.sampler,
            diffusion_stopping_criteria=self.stop,
            batch_size=batch,
            device=device,
            model_kwargs={},
        )
        self.positions = torch.arange(length, length + canvas, dtype=torch.int32, device=device)[None]
        self.argmax, self.remaining = self.canvas, self.steps
        self.mark()

    @torch.no_grad()
    def body(self) -> Tensor:
        """`[B, L, hidden]` of the canvas. Never compiled: `generate()` compiles the forward as one."""
        return self.model.model(
            cache=self.cache,
            decoder_input_ids=self.canvas,
            self_conditioning_logits=self.conditioning,
            decoder_attention_mask=self.masks,
            decoder_position_ids=self.positions,
        ).last_hidden_state

    @torch.no_grad()
    def forward(self) -> Tensor:
        """`[B, L, V]` logits of the canvas, float32."""
        return self.decoder(
            cache=self.cache,
            decoder_input_ids=self.canvas,
            self_conditioning_logits=self.conditioning,
            decoder_attention_mask=self.masks,
            decoder_position_ids=self.positions,
        ).logits

    @torch.no_grad()
    def step(self) -> Tensor:
        """`[B]` whether each row is finished, after one denoising step.

        Raises:
            LabError: the cap is reached.
        """
        if self.remaining == 0:
            raise LabError(f"all {self.steps} steps of this canvas are taken; begin() a new one")
        self.canvas, self.argmax, self.conditioning, self.finished = self.model._denoising_step(
            decoder_forward=self.decoder,
            current_canvas=self.canvas,
            argmax_canvas=self.argmax,
            input_ids=self.prompt,
            decoder_position_ids=self.positions,
            self_conditioning_logits=self.conditioning,
            mask_mapping=self.masks,
            cache=self.cache,
            finished_denoising=self.finished,
            cur_step=self.remaining,
            sampler=self.sampler,
            logits_processor=self.processors,
            diffusion_stopping_criteria=self.stop,
        )
        self.remaining -= 1
        return self.finished

    def denoise(self) -> Tensor:
        """`[B, L]` the canvas as `generate()` returns it: steps until every row is finished, or the cap."""
        while self.remaining and not bool(self.step().all()):
            pass
        return self.argmax

    @torch.no_grad()
    def append(self) -> None:
        """Reads the finished canvas into the cache: what comes between one canvas and the next `begin()`.

        A static cache has room for one.
        """
        self._read(self.argmax, self.encoder)

    def mark(self) -> None:
        """Notes the state that `rewind` returns to."""
        history = None if self.stop is None else self.stop.argmax_canvas_history
        self._marked = (
            self.canvas,
            self.argmax,
            self.conditioning,
            self.finished.clone(),  # the official step ors into it
            self.remaining,
            None if history is None else history.clone(),
            self.length,
            _layers_of(self.cache),
        )

    def rewind(self) -> None:
        """Returns to the marked state: the same canvas, self-conditioning and context."""
        self.canvas, self.argmax, self.conditioning, finished, self.remaining, history, self.length, layers = (
            self._marked
        )
        self.finished = finished.clone()
        if self.stop is not None:
            self.stop.argmax_canvas_history = None if history is None else history.clone()
        _restore(self.cache, layers)

    def _read(self, tokens: Tensor, encoder: Any) -> None:
        (batch, count), start = tokens.shape, self.length
        positions = torch.arange(start, start + count, dtype=torch.int32, device=tokens.device)[None]
        unread, masks = self.model._prepare_encoder_inputs(
            input_ids=tokens,
            attention_mask=torch.ones(batch, start + count, dtype=torch.bool, device=tokens.device),
            encoder_position_ids=positions,
            cache=self.cache,
            is_prefill=True,  # all of `tokens` is unread
            canvas_length=count,
            batch_size=batch,
        )
        encoder(input_ids=unread, attention_mask=masks, cache=self.cache, position_ids=positions)
        self.length += count


# -- memory --------------------------------------------------------------------------------------------------


def bytes_needed(
    config: DiffusionGemmaConfig,
    *,
    batch: int,
    context: int,
    weight_bytes: int = 4,
    dtype: torch.dtype | str = "float32",
) -> int:
    """Bytes that a model of this configuration and its denoising step take, counted without allocating any.

    Weights, KV cache, the vocabulary-sized buffers of the sampler, and activations from above.

    Args:
        weight_bytes: of a parameter while the model is made: 4 on a CPU, where `build` draws in float32 whatever the
            dtype, the size of the dtype elsewhere.
        dtype: of cache and activations.
    """
    text, length = config.text_config, config.canvas_length
    layers = [text.per_layer_config[i] for i in range(text.num_hidden_layers)]
    key_values = sum(2 * layer.num_key_value_heads * layer.head_dim for layer in layers)
    widest = max(text.hidden_size, text.intermediate_size, 2 * text.moe_intermediate_size * text.top_k_experts)
    return (
        weight_bytes * parameters_of(config)
        + batch * (context + length) * key_values * as_dtype(dtype).itemsize
        + VOCABULARY_BUFFERS * batch * length * text.vocab_size * 4
        + ACTIVATION_BUFFERS * batch * max(context, length) * widest * 4
    )


def parameters_of(config: DiffusionGemmaConfig) -> int:
    """Parameters of the configuration, tied ones once, without allocating any."""
    with torch.device("meta"):
        return sum(p.numel() for p in DiffusionGemmaForBlockDiffusion(config).parameters())


# -- caches and compilation ----------------------------------------------------------------------------------


def _check_prompt(model: DiffusionGemmaForBlockDiffusion, prompt: Tensor, *, at_least: int) -> None:
    if prompt.ndim != 2 or prompt.shape[0] < 1 or prompt.shape[1] < at_least:
        raise LabError(
            f"prompt of shape {list(prompt.shape)}: want [batch, tokens], a row and {at_least} tokens or more"
        )
    room = model.config.text_config.max_position_embeddings - model.config.canvas_length
    if prompt.shape[1] > room:
        raise LabError(f"prompt of {prompt.shape[1]} tokens: this model has room for {room} before a canvas")


def _cache(model: DiffusionGemmaForBlockDiffusion, static_length: int | None) -> Cache:
    """A static cache of this many tokens, or a dynamic one; of this stepper alone, unlike the one `generate` keeps."""
    config = model.config.get_text_config(decoder=True)
    return DynamicCache(config=config) if static_length is None else StaticCache(config, static_length)


def _compiled_encoder(model: DiffusionGemmaForBlockDiffusion) -> Any:
    """The encoder as `_compile_functions` compiles it, kept where that keeps it."""
    if not hasattr(model, "_compiled_encoder"):
        model._compiled_encoder = torch.compile(model.model.encoder, mode="reduce-overhead", fullgraph=True)
    return model._compiled_encoder


_LAYER_STATE = ("keys", "values", "cumulative_length", "cumulative_length_int")


def _layers_of(cache: Cache) -> list[dict[str, Any]]:
    """What every layer of the cache holds now. A dynamic cache never writes into its tensors, a static one does."""
    held = [{name: vars(layer)[name] for name in _LAYER_STATE if name in vars(layer)} for layer in cache.layers]
    if not cache.is_compileable:
        return held
    return [{n: v.clone() if isinstance(v, Tensor) else v for n, v in layer.items()} for layer in held]


def _restore(cache: Cache, layers: list[dict[str, Any]]) -> None:
    """Puts back what `_layers_of` found."""
    for layer, state in zip(cache.layers, layers, strict=True):
        for name, value in state.items():
            if cache.is_compileable and isinstance(value, Tensor):
                vars(layer)[name].copy_(value)  # compiled code knows this tensor by its address
            else:
                setattr(layer, name, value)
