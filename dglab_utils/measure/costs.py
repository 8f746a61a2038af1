"""What one forward of DiffusionGemma costs, worked out from its shape: FLOPs, bytes, memory, and time on a roofline.

    shape, card = ModelShape.from_mapping(...), Hardware.from_mapping(...)
    step = forward(shape, "canvas", batch=4, context=1024, precision=PRECISIONS["fp8"])
    step.flops, step.bytes                              # by component
    seconds(step, card, efficiency).total               # s

Three kinds of forward (`MODES`): `ar`, the encoder over one new token of each row with its LM head and sampler;
`canvas`, one denoising step, from self-conditioning to the stop test; `prefill`, the encoder over new tokens without
LM head. Each is a list of parts. A part does so many FLOPs (matrix products alone, a product of n × m × k counts
2nmk) and moves so many bytes; it takes the longer of bytes/bandwidth and FLOPs/peak (S. Williams, A. Waterman,
D. Patterson, Roofline, CACM 2009), parts follow one another, and every layer adds a fixed overhead. Three numbers of
`Efficiency` say how much of the datasheet is reached.

What is counted is what the official code multiplies (transformers/models/diffusion_gemma): full-attention layers have
no value projection (values are the keys before norm and rotation) but cache both; the dense MLP runs beside the
experts; LM head and self-conditioning read the same embedding. What it leaves out: the copies of the cache that the
official decoder makes in every layer, the missing self-conditioning of a canvas's first step, images, tensor
parallelism, and rows of a batch that wait for the slowest.

Pure arithmetic: knows nothing of torch, of files, or of what was measured. `costs_serving` builds requests from these
forwards, `costs_published` holds the model against published rates. `report/static/cost_explorer.js` repeats the
formulas; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dglab_utils.errors import LabError

COMPONENTS = (
    "attention",
    "dense MLP",
    "router and experts",
    "LM head",
    "self-conditioning",
    "sampler",
    "rest",
)
Mode = Literal["ar", "canvas", "prefill"]
MODES: tuple[Mode, ...] = ("ar", "canvas", "prefill")
LOGIT_BYTES = 4  # float32, whatever the weights are


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a text model. Lengths in tokens, widths in features.

    Attributes:
        sliding_layers, full_layers: layers that attend to a window, and to everything.
        kv_heads, head_dim: of sliding layers. full_kv_heads, full_head_dim: of full ones.
        mlp_width: of the dense MLP, and of the self-conditioning MLP.
        self_conditioning: False for the autoregressive sibling, which has the same text shape without it.
    """

    name: str
    hidden: int
    sliding_layers: int
    full_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    full_kv_heads: int
    full_head_dim: int
    mlp_width: int
    experts: int
    experts_per_token: int
    expert_width: int
    vocab: int
    sliding_window: int
    canvas_length: int = 256
    self_conditioning: bool = True

    @classmethod
    def from_mapping(cls, name: str, sizes: Mapping[str, Any]) -> ModelShape:
        """The shape called `name`, from a mapping with this class's fields; other keys (`source`) are left aside.

        Raises:
            LabError: a size is missing, or is not a positive whole number.
        """
        values: dict[str, Any] = {}
        for field in cls.__dataclass_fields__.values():
            if field.name in ("name", "self_conditioning"):
                continue
            value = sizes.get(field.name, field.default)
            if not isinstance(value, int) or value < (field.name not in ("sliding_layers", "full_layers")):
                raise LabError(f"shape {name}: {field.name} is {sizes.get(field.name)!r}, want a positive whole number")
            values[field.name] = value
        return cls(name=name, **values, self_conditioning=bool(sizes.get("self_conditioning", True)))

    @classmethod
    def from_config(cls, name: str, config: Any) -> ModelShape:
        """The shape of an official `DiffusionGemmaConfig`."""
        text = config.text_config
        kinds = list(text.layer_types)
        # Without a layer of a kind its sizes do not matter; the last layer is always a full one.
        sliding = text.per_layer_config[kinds.index("sliding_attention")] if "sliding_attention" in kinds else text
        full = text.per_layer_config[kinds.index("full_attention")]
        return cls(
            name=name,
            hidden=text.hidden_size,
            sliding_layers=kinds.count("sliding_attention"),
            full_layers=kinds.count("full_attention"),
            heads=text.num_attention_heads,
            kv_heads=sliding.num_key_value_heads,
            head_dim=sliding.head_dim,
            full_kv_heads=full.num_key_value_heads,
            full_head_dim=full.head_dim,
            mlp_width=text.intermediate_size,
            experts=text.num_experts,
            experts_per_token=text.top_k_experts,
            expert_width=text.moe_intermediate_size,
            vocab=text.vocab_size,
            sliding_window=text.sliding_window,
            canvas_length=config.canvas_length,
        )

    @property
    def layers(self) -> int:
        """All layers."""
        return self.sliding_layers + self.full_layers

    @property
    def attention_kinds(self) -> tuple[tuple[int, int, int, int, int | None], ...]:
        """(layers, KV heads, head width, projections of keys and values, window) of both kinds of layer."""
        return (
            (self.sliding_layers, self.kv_heads, self.head_dim, 2, self.sliding_window),
            (self.full_layers, self.full_kv_heads, self.full_head_dim, 1, None),
        )

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert in one layer: gate, up and down."""
        return 3 * self.hidden * self.expert_width

    @property
    def embedding_parameters(self) -> int:
        """The embedding, which is the LM head too."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> dict[str, int]:
        """Weights by component, tied ones once (the embedding as "LM head"). "sampler" has none."""
        attention = sum(
            n * (self.hidden * d * ((1 + 1) * self.heads + projections * g) + 2 * d)  # q, o, k (and v); two norms
            for n, g, d, projections, _ in self.attention_kinds
        )
        router = self.experts * self.hidden + self.hidden + self.experts  # projection, scale, scale of each expert
        return {
            "attention": attention,
            "dense MLP": self.layers * 3 * self.hidden * self.mlp_width,
            "router and experts": self.layers * (router + self.experts * self.expert_parameters),
            "LM head": self.embedding_parameters,
            "self-conditioning": self.self_conditioning * (3 * self.hidden * self.mlp_width + self.hidden),
            "sampler": 0,
            "rest": (7 * self.layers + 1) * self.hidden,  # norms
        }

    @property
    def total_parameters(self) -> int:
        """All weights."""
        return sum(self.parameters.values())

    @property
    def active_parameters(self) -> int:
        """Weights that one autoregressive token touches: of the experts those it is routed to."""
        idle = self.layers * (self.experts - self.experts_per_token) * self.expert_parameters
        return self.total_parameters - idle - self.parameters["self-conditioning"]


@dataclass(frozen=True)
class Hardware:
    """One card by its datasheet: bandwidth in bytes/s, dense peaks in FLOP/s, memory in bytes.

    `fp8` is 0 where a card multiplies no fp8, or nobody published the peak: fp8 weights are read as such and
    multiplied at the bf16 peak.
    """

    name: str
    bandwidth: float
    bf16: float
    memory: float
    fp8: float = 0.0

    def __post_init__(self) -> None:
        for field in ("bandwidth", "bf16", "memory"):
            if not getattr(self, field) > 0:
                raise LabError(f"hardware {self.name}: {field} is {getattr(self, field)!r}, want a positive number")

    @classmethod
    def from_mapping(cls, name: str, figures: Mapping[str, Any]) -> Hardware:
        """A card from `bandwidth_GB_s`, `bf16_TFLOP_s`, `memory_GB` and, where there is one, `fp8_TFLOP_s`."""
        try:
            return cls(
                name=name,
                bandwidth=figures["bandwidth_GB_s"] * 1e9,
                bf16=figures["bf16_TFLOP_s"] * 1e12,
                memory=figures["memory_GB"] * 1e9,
                fp8=figures.get("fp8_TFLOP_s", 0.0) * 1e12,
            )
        except (KeyError, TypeError) as error:
            raise LabError(f"hardware {name}: {error} is missing or no number") from None

    def peak(self, dtype: str) -> float:
        """FLOP/s of products of `dtype`, "bf16" or "fp8"."""
        return self.fp8 if dtype == "fp8" and self.fp8 else self.bf16


@dataclass(frozen=True)
class Precision:
    """How numbers are kept. Bytes of one weight of a layer, of the embedding, of a cached value, of an activation;
    and the type in which layers multiply. Scores of attention and everything with the embedding multiply in bf16.
    """

    name: str
    weight: float
    embedding: float
    cache: float = 2.0
    activation: float = 2.0
    products: Literal["bf16", "fp8"] = "bf16"


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("float32", 4.0, 4.0, 4.0, 4.0),
        Precision("bf16", 2.0, 2.0),
        # Engines' fp8 checkpoints leave the embedding in bf16.
        Precision("fp8", 1.0, 2.0, products="fp8"),
        # Weights alone: 4 bits, and a 16-bit scale for 32 of them.
        Precision("int4", 0.5625, 2.0),
        # llama.cpp's mixture: about 4.85 bits a weight; the embedding in blocks of 256 weights of 210 bytes (Q6_K).
        Precision("Q4_K_M", 4.85 / 8, 210 / 256),
    )
}


@dataclass(frozen=True)
class Software:
    """How often the code around the products passes over its tensors. A pass is one read or one write of all of it.

    Attributes:
        canvas_passes: over float32 logits `[batch · canvas_length, vocab]` in one denoising step.
        token_passes: over float32 logits `[batch, vocab]` for one autoregressive token.
        canvas_buffers, token_buffers: how many such tensors are alive at once.
        hidden_passes: over hidden states, in norms and sums of one layer.
    """

    name: str
    canvas_passes: float
    token_passes: float
    canvas_buffers: float
    token_buffers: float
    hidden_passes: float


# One operation after the other, as eager PyTorch runs them; each reads its inputs and writes its output once.
OFFICIAL_STEP: dict[str, float] = {
    "logits to float32": 1.5,  # reads 16 bits
    "cap: divide, tanh, multiply": 6,
    "temperature": 2,
    "softmax": 2,
    "multinomial": 1,
    "argmax": 1,
    "entropy of the accept rule": 12.5,  # logsumexp 1, subtract 2, check 1.5, softmax 2, clamp 2, product 3, sum 1
    "entropy of the stop test": 12.5,
    "logits to 16 bits": 1.5,
}
OFFICIAL = Software("Transformers, eager", sum(OFFICIAL_STEP.values()), 12.5, 8, 3, 25)
"""25 passes over hidden states a layer: seven norms (2 each), three sums (3 each), the layer's scale (2)."""

ENGINE = Software("serving engine", 12, 4, 6, 2, 10)
"""Assumed. Six float32 buffers alive at once (vLLM issue 50699), each written and read once; sums fused into norms."""


@dataclass(frozen=True)
class Efficiency:
    """The three numbers that are fitted: fractions of bandwidth and of peak that are reached, and s a layer of
    overhead (launches, synchronisation, Python) that every forward adds.
    """

    bandwidth: float
    peak: float
    overhead: float


IDEAL = Efficiency(1.0, 1.0, 0.0)


@dataclass(frozen=True)
class Part:
    """One piece of a forward: its component, FLOPs of its products, bytes it moves, and the type it multiplies in."""

    component: str
    name: str
    flops: float
    bytes: float
    products: Literal["bf16", "fp8"] = "bf16"


@dataclass(frozen=True)
class Cost:
    """One forward: its parts, and the layers it runs through."""

    parts: tuple[Part, ...]
    layers: float

    @property
    def flops(self) -> dict[str, float]:
        """FLOPs by component."""
        return {c: sum(p.flops for p in self.parts if p.component == c) for c in COMPONENTS}

    @property
    def bytes(self) -> dict[str, float]:
        """Bytes moved by component."""
        return {c: sum(p.bytes for p in self.parts if p.component == c) for c in COMPONENTS}


@dataclass(frozen=True)
class Time:
    """Seconds of one forward, by component, and the overhead beside them."""

    by_component: dict[str, float]
    overhead: float

    @property
    def total(self) -> float:
        """Seconds of the whole forward."""
        return sum(self.by_component.values()) + self.overhead


@dataclass(frozen=True)
class Memory:
    """Bytes that a batch needs: weights, keys and values, vocabulary-sized buffers."""

    weights: float
    cache: float
    vocabulary: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.cache + self.vocabulary


def expert_coverage(experts: int, chosen: int, tokens: float) -> float:
    """Distinct experts that `tokens` tokens touch in one layer, in expectation: E(1 − (1 − k/E)^T).

    Holds for tokens that choose independently and uniformly; real tokens agree more, and touch fewer.
    """
    return experts * (1 - (1 - chosen / experts) ** tokens)


def forward(
    shape: ModelShape,
    mode: Mode,
    *,
    batch: int,
    context: int,
    tokens: int | None = None,
    precision: Precision = PRECISIONS["bf16"],
    software: Software = ENGINE,
    skips_masked: bool = True,
) -> Cost:
    """The cost of one forward.

    Args:
        batch: rows.
        context: tokens of each row that are in the cache before the forward.
        tokens: new tokens of each row; by default 1 (`ar`) or a canvas (`canvas`), to be given for `prefill`.
        skips_masked: whether attention leaves out what its causal or sliding mask hides, as flash kernels do. False
            multiplies every query with every cached key first, as the official code does by default.

    Raises:
        LabError: unknown mode, a batch, context or token count that cannot be; a canvas of a shape without
            self-conditioning.
    """
    if mode not in MODES:
        raise LabError(f"mode {mode!r}: there are {', '.join(MODES)}")
    if mode == "canvas" and not shape.self_conditioning:
        raise LabError(f"mode canvas: {shape.name} has no self-conditioning, it is not a diffusion model")
    tokens = tokens or {"ar": 1, "canvas": shape.canvas_length}.get(mode)
    if tokens is None or tokens < 1 or batch < 1 or context < 0:
        raise LabError(f"batch {batch}, context {context}, tokens {tokens}: want at least 1, 0 and 1")
    t = batch * tokens
    parts = [
        *_attention(shape, mode, batch, context, tokens, precision, skips_masked),
        _mlp(shape, t, precision),
        *_experts(shape, t, precision),
        _rest(shape, t, precision, software),
    ]
    if mode != "prefill":
        passes = software.canvas_passes if mode == "canvas" else software.token_passes
        parts += [
            _with_embedding(shape, "LM head", "LM head", t, precision),
            Part("sampler", "cap to stop test", 0.0, passes * LOGIT_BYTES * t * shape.vocab),
        ]
    if mode == "canvas":
        parts += _self_conditioning(shape, t, precision)
    return Cost(tuple(parts), shape.layers)


def seconds(cost: Cost, hardware: Hardware, efficiency: Efficiency = IDEAL) -> Time:
    """The roofline's time of a forward, by component."""
    by_component = dict.fromkeys(COMPONENTS, 0.0)
    for part in cost.parts:
        moving = part.bytes / (hardware.bandwidth * efficiency.bandwidth)
        multiplying = part.flops / (hardware.peak(part.products) * efficiency.peak)
        by_component[part.component] += max(moving, multiplying)
    return Time(by_component, efficiency.overhead * cost.layers)


def memory(
    shape: ModelShape,
    mode: Mode,
    *,
    batch: int,
    context: int,
    precision: Precision = PRECISIONS["bf16"],
    software: Software = ENGINE,
) -> Memory:
    """Bytes that decoding (`ar` or `canvas`) of `batch` rows with `context` cached tokens each needs.

    Activations of the layers are left out: they are small beside the logits.
    """
    embedding = shape.embedding_parameters
    weights = (shape.total_parameters - embedding) * precision.weight + embedding * precision.embedding
    a_token = 2 * precision.cache  # keys and values
    cache = sum(
        n * batch * min(context, context if window is None else window) * g * d * a_token
        for n, g, d, _, window in shape.attention_kinds
    )
    rows, buffers = (
        (batch * shape.canvas_length, software.canvas_buffers) if mode == "canvas" else (batch, software.token_buffers)
    )
    return Memory(weights, cache, buffers * LOGIT_BYTES * rows * shape.vocab)


# -- the parts -----------------------------------------------------------------------------------------------
# Every product reads its weights and its input, and writes its output, once.


def _attention(
    shape: ModelShape, mode: Mode, batch: int, context: int, tokens: int, p: Precision, skips_masked: bool
) -> list[Part]:
    t = batch * tokens
    projecting = [0.0, 0.0]  # FLOPs, bytes
    scoring = [0.0, 0.0]
    for layers, g, d, projections, window in shape.attention_kinds:
        queries, keys = shape.heads * d, g * d
        weights = shape.hidden * (2 * queries + projections * keys)
        projecting[0] += layers * 2 * t * weights
        projecting[1] += layers * (
            weights * p.weight + t * (2 * shape.hidden + 2 * queries + projections * keys) * p.activation
        )
        # A sliding layer's cache keeps one token less than its window: the new token is the last of it.
        cached = context if window is None else min(context, window - 1)
        pairs = batch * tokens * (cached + tokens)
        if mode != "canvas" and skips_masked:
            pairs = batch * causal_pairs(context, tokens, window)
        scoring[0] += layers * 4 * pairs * queries
        moved = batch * (cached + tokens) + t  # read once, and the new ones written
        scoring[1] += layers * (moved * 2 * keys * p.cache + t * 2 * queries * p.activation)
    return [
        Part("attention", "projections", projecting[0], projecting[1], p.products),
        Part("attention", "scores and mixing", scoring[0], scoring[1]),
    ]


def causal_pairs(context: int, tokens: int, window: int | None) -> int:
    """Pairs of query and key that a causal mask with this window (None: no window) lets through, in one row."""
    growing = tokens if window is None else min(tokens, max(0, window - context))
    pairs = growing * context + growing * (growing + 1) // 2
    return pairs + (tokens - growing) * (window or 0)


def _mlp(shape: ModelShape, t: int, p: Precision) -> Part:
    weights = shape.parameters["dense MLP"]
    # Products write 2 × width and read it back once; the activation between them reads two and writes one.
    moved = shape.layers * t * (2 * shape.hidden + 6 * shape.mlp_width) * p.activation
    return Part("dense MLP", "dense MLP", 2.0 * t * weights, weights * p.weight + moved, p.products)


def _experts(shape: ModelShape, t: int, p: Precision) -> list[Part]:
    routing = shape.hidden * shape.experts
    touched = expert_coverage(shape.experts, shape.experts_per_token, t) * shape.expert_parameters
    chosen = t * shape.experts_per_token
    n = shape.layers
    return [
        Part(
            "router and experts",
            "router",
            n * 2.0 * t * routing,
            n * (routing * p.weight + t * (shape.hidden + 2 * shape.experts) * p.activation),
        ),
        Part(
            "router and experts",
            "experts",
            n * 2.0 * chosen * shape.expert_parameters,
            n * (touched * p.weight + chosen * (2 * shape.hidden + 6 * shape.expert_width) * p.activation),
            p.products,
        ),
    ]


def _with_embedding(shape: ModelShape, component: str, name: str, t: int, p: Precision) -> Part:
    """A product of `[t, hidden]` with the embedding to `[t, vocab]`, or the other way round: it costs the same."""
    weights = shape.embedding_parameters
    return Part(
        component,
        name,
        2.0 * t * weights,
        weights * p.embedding + t * (shape.hidden + shape.vocab) * p.activation,
    )


def _self_conditioning(shape: ModelShape, t: int, p: Precision) -> list[Part]:
    weights = 3 * shape.hidden * shape.mlp_width
    return [
        # softmax of the last step's 16-bit logits in float32, and its cast back
        Part("self-conditioning", "softmax", 0.0, 2 * (p.activation + LOGIT_BYTES) * t * shape.vocab),
        _with_embedding(shape, "self-conditioning", "probabilities × embedding", t, p),
        Part(
            "self-conditioning",
            "MLP",
            2.0 * t * weights,
            weights * p.weight + t * (2 * shape.hidden + 6 * shape.mlp_width) * p.activation,
            p.products,
        ),
    ]


def _rest(shape: ModelShape, t: int, p: Precision, software: Software) -> Part:
    passes = software.hidden_passes * shape.layers + 2  # the last norm
    looked_up = t * shape.hidden * (p.embedding + p.activation)
    return Part(
        "rest",
        "embedding, norms, sums",
        0.0,
        shape.parameters["rest"] * p.weight + looked_up + passes * t * shape.hidden * p.activation,
    )
