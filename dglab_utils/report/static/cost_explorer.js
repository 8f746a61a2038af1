/* Should I serve DiffusionGemma or Gemma 4 on my card, at my load? The cost model, to be played with.

   A classic script for pages: it fills every <div class="dglab-cost-explorer" data-model="..."> (report/cost_explorer.py).
   `costs` is the arithmetic of measure/costs.py and measure/costs_serving.py, function by function under the same names,
   and knows nothing of the page; a test holds the two together. What the formulas mean is written there. */

const dglabCostExplorer = (() => {
  "use strict";

  const COMPONENTS = [
    "attention",
    "dense MLP",
    "router and experts",
    "LM head",
    "self-conditioning",
    "sampler",
    "rest",
  ];
  const LOGIT_BYTES = 4;
  const LARGEST_BATCH = 256;
  const USABLE = 0.9;
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

  // -- one forward: measure/costs.py -------------------------------------------------------------------------------

  const layersOf = (shape) => shape.sliding_layers + shape.full_layers;
  const embeddingParameters = (shape) => shape.vocab * shape.hidden;
  const expertParameters = (shape) => 3 * shape.hidden * shape.expert_width;
  const attentionKinds = (shape) => [
    [shape.sliding_layers, shape.kv_heads, shape.head_dim, 2, shape.sliding_window],
    [shape.full_layers, shape.full_kv_heads, shape.full_head_dim, 1, Infinity],
  ];

  function parameters(shape) {
    const layers = layersOf(shape);
    const attention = attentionKinds(shape).map(
      ([n, g, d, projections]) => n * (shape.hidden * d * (2 * shape.heads + projections * g) + 2 * d),
    );
    const router = shape.experts * shape.hidden + shape.hidden + shape.experts;
    return {
      attention: sum(attention),
      "dense MLP": layers * 3 * shape.hidden * shape.mlp_width,
      "router and experts": layers * (router + shape.experts * expertParameters(shape)),
      "LM head": embeddingParameters(shape),
      "self-conditioning": shape.self_conditioning ? 3 * shape.hidden * shape.mlp_width + shape.hidden : 0,
      sampler: 0,
      rest: (7 * layers + 1) * shape.hidden,
    };
  }

  const expertCoverage = (experts, chosen, tokens) => experts * (1 - (1 - chosen / experts) ** tokens);

  /** Pairs of query and key that a causal mask with this window lets through, in one row. */
  function causalPairs(context, tokens, window) {
    const growing = Math.min(tokens, Math.max(0, window - context));
    const pairs = growing * context + Math.floor((growing * (growing + 1)) / 2);
    return pairs + (tokens > growing ? (tokens - growing) * window : 0);
  }

  /** Parts of one forward: { component, flops, bytes, products }. mode: ar, canvas or prefill. */
  function forward(shape, mode, batch, context, tokens, precision, software) {
    const t = batch * tokens;
    const layers = layersOf(shape);
    const { weight, cache, activation, products } = precision;
    const projecting = { component: "attention", flops: 0, bytes: 0, products };
    const scoring = { component: "attention", flops: 0, bytes: 0, products: "bf16" };
    for (const [n, g, d, projections, window] of attentionKinds(shape)) {
      const queries = shape.heads * d;
      const keys = g * d;
      const weights = shape.hidden * (2 * queries + projections * keys);
      projecting.flops += n * 2 * t * weights;
      projecting.bytes +=
        n * (weights * weight + t * (2 * shape.hidden + 2 * queries + projections * keys) * activation);
      const cached = Math.min(context, window - 1);
      const pairs = batch * (mode === "canvas" ? tokens * (cached + tokens) : causalPairs(context, tokens, window));
      scoring.flops += n * 4 * pairs * queries;
      scoring.bytes += n * ((batch * (cached + tokens) + t) * 2 * keys * cache + t * 2 * queries * activation);
    }
    const mlp = parameters(shape)["dense MLP"];
    const routing = shape.hidden * shape.experts;
    const touched = expertCoverage(shape.experts, shape.experts_per_token, t) * expertParameters(shape);
    const chosen = t * shape.experts_per_token;
    const parts = [
      projecting,
      scoring,
      {
        component: "dense MLP",
        flops: 2 * t * mlp,
        bytes: mlp * weight + layers * t * (2 * shape.hidden + 6 * shape.mlp_width) * activation,
        products,
      },
      {
        component: "router and experts",
        flops: layers * 2 * t * routing,
        bytes: layers * (routing * weight + t * (shape.hidden + 2 * shape.experts) * activation),
        products: "bf16",
      },
      {
        component: "router and experts",
        flops: layers * 2 * chosen * expertParameters(shape),
        bytes: layers * (touched * weight + chosen * (2 * shape.hidden + 6 * shape.expert_width) * activation),
        products,
      },
      {
        component: "rest",
        flops: 0,
        bytes:
          parameters(shape).rest * weight +
          t * shape.hidden * (precision.embedding + activation) +
          (software.hidden_passes * layers + 2) * t * shape.hidden * activation,
        products: "bf16",
      },
    ];
    const withEmbedding = (component) => ({
      component,
      flops: 2 * t * embeddingParameters(shape),
      bytes: embeddingParameters(shape) * precision.embedding + t * (shape.hidden + shape.vocab) * activation,
      products: "bf16",
    });
    if (mode !== "prefill") {
      const passes = mode === "canvas" ? software.canvas_passes : software.token_passes;
      parts.push(withEmbedding("LM head"));
      parts.push({ component: "sampler", flops: 0, bytes: passes * LOGIT_BYTES * t * shape.vocab, products: "bf16" });
    }
    if (mode === "canvas") {
      const weights = 3 * shape.hidden * shape.mlp_width;
      parts.push(
        {
          component: "self-conditioning",
          flops: 0,
          bytes: 2 * (activation + LOGIT_BYTES) * t * shape.vocab,
          products: "bf16",
        },
        withEmbedding("self-conditioning"),
        {
          component: "self-conditioning",
          flops: 2 * t * weights,
          bytes: weights * weight + t * (2 * shape.hidden + 6 * shape.mlp_width) * activation,
          products,
        },
      );
    }
    return parts;
  }

  /** { byComponent, overhead, total } in s. */
  function seconds(parts, layers, { hardware, efficiency }) {
    const byComponent = Object.fromEntries(COMPONENTS.map((component) => [component, 0]));
    for (const part of parts) {
      const peak = part.products === "fp8" && hardware.fp8 ? hardware.fp8 : hardware.bf16;
      byComponent[part.component] += Math.max(
        part.bytes / (hardware.bandwidth * efficiency.bandwidth),
        part.flops / (peak * efficiency.peak),
      );
    }
    return timed(byComponent, efficiency.overhead * layers);
  }
  const timed = (byComponent, overhead) => ({
    byComponent,
    overhead,
    total: sum(Object.values(byComponent)) + overhead,
  });

  /** Bytes: { weights, cache, vocabulary, total }. mode: ar or canvas. */
  function memory(shape, mode, batch, context, { precision, software }) {
    const embedding = embeddingParameters(shape);
    const weights =
      (sum(Object.values(parameters(shape))) - embedding) * precision.weight + embedding * precision.embedding;
    const cache = sum(
      attentionKinds(shape).map(
        ([n, g, d, , window]) => n * batch * Math.min(context, window) * g * d * 2 * precision.cache,
      ),
    );
    const canvas = mode === "canvas";
    const rows = canvas ? batch * shape.canvas_length : batch;
    const vocabulary =
      (canvas ? software.canvas_buffers : software.token_buffers) * LOGIT_BYTES * rows * shape.vocab;
    return { weights, cache, vocabulary, total: weights + cache + vocabulary };
  }

  // -- requests: measure/costs_serving.py --------------------------------------------------------------------------
  // load: { batch, prompt, output, steps }; setup: { hardware, precision, efficiency, software };
  // drafts: { count, acceptance } or null.

  const time = (shape, mode, batch, context, tokens, setup) =>
    seconds(forward(shape, mode, batch, context, tokens, setup.precision, setup.software), layersOf(shape), setup);

  function largestBatch(shape, mode, context, setup) {
    const one = memory(shape, mode, 1, context, setup);
    return Math.max(
      0,
      Math.floor((USABLE * setup.hardware.memory - one.weights) / (one.cache + one.vocabulary)),
    );
  }

  function serveDiffusion(shape, load, setup) {
    const length = shape.canvas_length;
    const canvases = Math.ceil(load.output / length);
    const context = Math.floor(load.prompt + ((canvases - 1) * length) / 2);
    const prefill = time(shape, "prefill", load.batch, 0, load.prompt, setup).total;
    const step = time(shape, "canvas", load.batch, context, length, setup);
    const encode = time(shape, "prefill", load.batch, context, length, setup).total;
    const total = prefill + canvases * load.steps * step.total + (canvases - 1) * encode;
    const longest = load.prompt + canvases * length;
    return {
      prefill,
      first: prefill + load.steps * time(shape, "canvas", load.batch, load.prompt, length, setup).total,
      step,
      total,
      rate: (load.batch * load.output) / total,
      memory: memory(shape, "canvas", load.batch, longest, setup).total,
      weights: memory(shape, "canvas", load.batch, longest, setup).weights,
      fits: largestBatch(shape, "canvas", longest, setup),
    };
  }

  const tokensARound = ({ count, acceptance }) => (1 - acceptance ** (count + 1)) / (1 - acceptance);

  function round(shape, batch, context, drafts, setup) {
    const check = time(shape, "ar", batch, context, drafts.count + 1, setup);
    const layers = layersOf(shape);
    const parts = forward(shape, "ar", batch, context, 1, setup.precision, setup.software).map((part) => {
      const share = part.component === "LM head" || part.component === "sampler" ? 1 : 1 / layers;
      return { ...part, flops: part.flops * share, bytes: part.bytes * share };
    });
    const draft = seconds(parts, 1, setup);
    return timed(
      Object.fromEntries(COMPONENTS.map((c) => [c, check.byComponent[c] + drafts.count * draft.byComponent[c]])),
      check.overhead + drafts.count * draft.overhead,
    );
  }

  function serveAutoregressive(shape, load, setup, drafts) {
    const context = Math.floor(load.prompt + load.output / 2);
    const prefill = time(shape, "prefill", load.batch, 0, load.prompt, setup).total;
    const token = time(shape, "ar", load.batch, context, 1, setup);
    const head = token.byComponent["LM head"] + token.byComponent.sampler;
    const step = drafts ? round(shape, load.batch, context, drafts, setup) : token;
    const total = prefill + head + ((load.output - 1) / (drafts ? tokensARound(drafts) : 1)) * step.total;
    const longest = load.prompt + load.output;
    return {
      prefill,
      first: prefill + head,
      step,
      total,
      rate: (load.batch * load.output) / total,
      memory: memory(shape, "ar", load.batch, longest, setup).total,
      weights: memory(shape, "ar", load.batch, longest, setup).weights,
      fits: largestBatch(shape, "ar", longest, setup),
    };
  }

  /** Both ways for one load, the speedup, and the smallest batch at which diffusion is not faster (null: none). */
  function compare(shape, load, setup, drafts) {
    const sibling = { ...shape, self_conditioning: false };
    const speedup = (batch) => {
      const at = { ...load, batch };
      return serveDiffusion(shape, at, setup).rate / serveAutoregressive(sibling, at, setup, drafts).rate;
    };
    let breakEven = null;
    for (let batch = 1; batch <= LARGEST_BATCH && breakEven === null; batch++) {
      if (speedup(batch) <= 1) breakEven = batch;
    }
    return {
      diffusion: serveDiffusion(shape, load, setup),
      autoregressive: serveAutoregressive(sibling, load, setup, drafts),
      speedup: speedup(load.batch),
      breakEven,
    };
  }

  // -- the answer --------------------------------------------------------------------------------------------------

  const plain = (value, digits = 2) => Number(value.toPrecision(digits)).toLocaleString("en");
  const gigabytes = (bytes) => `${plain(bytes / 1e9, 3)} GB`;
  const requests = (count) => (count === 1 ? "1 request" : `${count} requests`);
  const CLOSE = 1.05; // rates that differ by less are called equal

  /** One plain sentence or two: which of the two to serve. */
  function answer({ diffusion, autoregressive, speedup, breakEven }, load, setup) {
    const { name, memory: bytes } = setup.hardware;
    const room = `${gigabytes(USABLE * bytes)} of ${name} can be used`;
    const at = `${requests(load.batch)} at once`;
    if (load.batch > autoregressive.fits && load.batch > diffusion.fits) {
      return autoregressive.fits
        ? `Neither: ${at} do not fit; ${room}. Up to ${autoregressive.fits} fit with Gemma 4, ${diffusion.fits} with DiffusionGemma.`
        : `Neither: in ${setup.precision.name} the weights are ${gigabytes(diffusion.weights)}, and ${room}.`;
    }
    if (load.batch > diffusion.fits) {
      return `Gemma 4: for ${at} DiffusionGemma needs ${gigabytes(diffusion.memory)}, and ${room}; at most ${diffusion.fits} fit.`;
    }
    if (load.batch > autoregressive.fits) {
      return `DiffusionGemma: for ${at} Gemma 4 needs ${gigabytes(autoregressive.memory)}, and ${room}.`;
    }
    const until =
      breakEven === null || breakEven > diffusion.fits
        ? `it stays ahead as far as the memory goes, ${requests(diffusion.fits)}`
        : `it stops paying at ${breakEven}`;
    if (speedup >= CLOSE) {
      return `DiffusionGemma: ${plain(speedup)} times the tokens a second of Gemma 4 at ${at}; ${until}.`;
    }
    if (speedup > 1 / CLOSE) return `Either: at ${at} both give about ${plain(diffusion.rate)} tokens a second.`;
    const below = breakEven > 1 ? `DiffusionGemma pays below ${breakEven} at once` : "DiffusionGemma pays at no load";
    return `Gemma 4: ${plain(1 / speedup)} times the tokens a second of DiffusionGemma at ${at}; ${below}.`;
  }

  // -- the page ----------------------------------------------------------------------------------------------------

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }
  const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const milliseconds = (value) => {
    const ms = 1000 * value;
    return ms >= 10000 ? `${plain(value, 3)} s` : `${plain(ms, 3)} ms`;
  };

  const BATCHES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];
  const LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072];
  const OUTPUTS = LENGTHS.slice(0, 8);
  const STEPS = [1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48];
  const ACCEPTANCES = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95];
  const OWN = "my own card";
  const DRAFTS = 4;

  /** A slider over given values. */
  function dial(caption, values, unit, value, onInput) {
    const input = h("input", { type: "range", min: 0, max: values.length - 1, step: 1, "aria-label": caption });
    const shown = h("b", { "aria-hidden": "true" });
    const say = () => {
      const text = unit(values[input.value]);
      shown.textContent = text;
      input.setAttribute("aria-valuetext", text);
    };
    // the nearest there is
    input.value = values.reduce((best, v, i) => (Math.abs(v - value) < Math.abs(values[best] - value) ? i : best), 0);
    input.addEventListener("input", () => (say(), onInput()));
    say();
    const node = h("label", {}, h("span", {}, caption, shown), input);
    return { node, value: () => values[input.value] };
  }

  function choice(caption, names, value, onChange) {
    const input = h("select", { "aria-label": caption }, ...names.map((name) => h("option", { value: name }, name)));
    input.value = value;
    input.addEventListener("change", onChange);
    return { node: h("label", {}, h("span", {}, caption), input), input };
  }

  function quantity(caption, value, onInput) {
    const input = h("input", { type: "number", min: 0.001, step: "any", value, "aria-label": caption });
    input.addEventListener("input", onInput);
    return {
      node: h("label", {}, h("span", {}, caption), input),
      input,
      value: () => (input.valueAsNumber > 0 && input.valueAsNumber < 1e9 ? input.valueAsNumber : null),
    };
  }

  /** Builds the explorer in `el`; model: { shape, hardware: [], precisions: [], software, efficiency, start }. */
  function mount(el, model) {
    const { start } = model;
    const first = model.hardware.find(({ name }) => name === start.hardware);
    const card = choice("card", [...model.hardware.map(({ name }) => name), OWN], start.hardware, () => update());
    const weights = choice("weights", model.precisions.map(({ name }) => name), start.precision, () => update());
    const own = [
      quantity("bandwidth, GB/s", first.bandwidth / 1e9, () => update()),
      quantity("bf16 peak, TFLOP/s", first.bf16 / 1e12, () => update()),
      quantity("memory, GB", first.memory / 1e9, () => update()),
    ];
    const ownNode = h("div", { class: "dg-dials" }, ...own.map(({ node }) => node));
    const count = (what) => (value) => `${value.toLocaleString("en")} ${what}`;
    const batch = dial("requests at once", BATCHES, String, start.batch, () => update());
    const steps = dial("denoising steps a canvas", STEPS, String, start.steps, () => update());
    const prompt = dial("tokens in", LENGTHS, count("tokens"), start.prompt, () => update());
    const output = dial("tokens out", OUTPUTS, count("tokens"), start.output, () => update());
    const drafting = h("input", { type: "checkbox" });
    drafting.addEventListener("change", () => update());
    const percent = (value) => `${Math.round(100 * value)} %`;
    const acceptance = dial("drafts accepted", ACCEPTANCES, percent, 0.8, () => update());
    const says = h("p", { class: "dg-says" });
    const live = h("p", { class: "dg-hidden", "aria-live": "polite" });
    const figures = h("tbody");
    const breakdown = h("tbody");
    const chart = s("svg", { class: "dg-chart", role: "img" });
    const key = (kind, text) => h("span", {}, h("i", { class: `dg-key dg-key-${kind}` }), text);
    const table = (caption, body) =>
      h(
        "table",
        { class: "dg-table" },
        h("caption", {}, caption),
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("td"),
            h("th", { scope: "col" }, "Diffusion", h("wbr"), "Gemma"), // where a phone breaks it
            h("th", { scope: "col" }, "Gemma 4"),
          ),
        ),
        body,
      );
    const root = h(
      "div",
      { class: "dglab", role: "group", "aria-label": "Cost explorer" },
      h("div", { class: "dg-dials" }, card.node, weights.node),
      ownNode,
      h("div", { class: "dg-dials" }, batch.node, prompt.node, output.node, steps.node),
      h(
        "div",
        { class: "dg-dials" },
        h("label", { class: "dg-check" }, drafting, `Gemma 4 predicts ${DRAFTS} tokens ahead`),
        acceptance.node,
      ),
      says,
      h(
        "div",
        { class: "dg-pair dg-even" },
        table("At this load", figures),
        h(
          "figure",
          {},
          chart,
          h(
            "figcaption",
            {},
            "Tokens a second of DiffusionGemma over Gemma 4's, by requests at once; both axes logarithmic.",
            h(
              "span",
              { class: "dg-legend" },
              key("sum", "fits into memory"),
              key("entropy", "does not"),
              key("bound", "equal"),
            ),
          ),
        ),
      ),
      table("One forward: a denoising step of 256 positions, and a token", breakdown),
      h(
        "p",
        { class: "dg-note" },
        "A model's answer, about speed alone: all requests begin together and all canvases take the same number of steps. How far it was off on published speeds is in the table of errors on this page.",
      ),
      live,
    );
    let speaking = null;
    let drawn = () => {};

    function settings() {
      let hardware = model.hardware.find(({ name }) => name === card.input.value);
      if (!hardware) {
        const [bandwidth, bf16, memory] = own.map((field) => field.value());
        if (bandwidth === null || bf16 === null || memory === null) return null;
        hardware = { name: OWN, bandwidth: bandwidth * 1e9, bf16: bf16 * 1e12, fp8: 0, memory: memory * 1e9 };
      }
      const precision = model.precisions.find(({ name }) => name === weights.input.value);
      return {
        load: { batch: batch.value(), prompt: prompt.value(), output: output.value(), steps: steps.value() },
        setup: { hardware, precision, software: model.software, efficiency: model.efficiency },
        drafts: drafting.checked ? { count: DRAFTS, acceptance: acceptance.value() } : null,
      };
    }

    function update() {
      ownNode.hidden = card.input.value !== OWN;
      acceptance.node.hidden = !drafting.checked;
      for (const field of own) field.input.setAttribute("aria-invalid", field.value() === null);
      const chosen = settings();
      if (chosen === null) {
        says.textContent = "Bandwidth, peak and memory must be positive numbers.";
        live.textContent = says.textContent;
        return;
      }
      const { load, setup, drafts } = chosen;
      const found = compare(model.shape, load, setup, drafts);
      says.textContent = answer(found, load, setup);
      clearTimeout(speaking);
      speaking = setTimeout(() => (live.textContent = says.textContent), 500);
      const both = [found.diffusion, found.autoregressive];
      const row = (name, show) =>
        h("tr", {}, h("th", { scope: "row" }, name), ...both.map((way) => h("td", {}, show(way))));
      figures.replaceChildren(
        row("tokens a second, all requests", ({ rate }) => plain(rate, 3)),
        row("tokens a second, each", ({ rate }) => plain(rate / load.batch, 3)),
        row("first text after", ({ first }) => milliseconds(first)),
        row("memory", ({ memory }) => gigabytes(memory)),
        row("most requests that fit", ({ fits }) => (fits ? plain(fits, 3) : "none")),
      );
      const longest = Math.max(...both.map(({ step }) => step.total));
      const bar = (value) =>
        h(
          "td",
          {},
          milliseconds(value),
          h("i", { class: "dg-share", style: `--dg-share:${value / longest}`, "aria-hidden": "true" }),
        );
      const line = (name, show) =>
        h("tr", {}, h("th", { scope: "row" }, name), ...both.map(({ step }) => bar(show(step))));
      breakdown.replaceChildren(
        ...COMPONENTS.map((component) => line(component, ({ byComponent }) => byComponent[component])),
        line("overhead", ({ overhead }) => overhead),
        line(drafts ? `all (Gemma 4: a round of ${plain(tokensARound(drafts))} tokens)` : "all", ({ total }) => total),
      );
      drawn = () => drawChart(found, load, setup, drafts);
      drawn();
    }

    function drawChart(found, load, setup, drafts) {
      const { width, height } = chart.getBoundingClientRect();
      if (!width) return; // in a closed tab or fold; the observer calls again when it opens
      const curve = BATCHES.map((at) => {
        const there = { ...load, batch: at };
        const sibling = { ...model.shape, self_conditioning: false };
        return (
          serveDiffusion(model.shape, there, setup).rate / serveAutoregressive(sibling, there, setup, drafts).rate
        );
      });
      const left = 42;
      const right = width - 10;
      const top = 10;
      const bottom = height - 34;
      const low = Math.min(0.25, ...curve);
      const high = Math.max(4, ...curve);
      const x = (at) => left + ((right - left) * Math.log(at)) / Math.log(BATCHES.at(-1));
      const y = (value) => bottom - ((bottom - top) * Math.log(value / low)) / Math.log(high / low);
      const path = (kind, keep) => {
        const points = BATCHES.map((at, i) => [at, curve[i]]).filter(([at]) => keep(at));
        const d = points.map(([at, v], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(v).toFixed(1)}`).join("");
        return s("path", { class: kind, d });
      };
      const label = (text, at, where, anchor = "middle") =>
        s("text", { x: at, y: where, "text-anchor": anchor }, text);
      const ticks = [0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64].filter((v) => v >= low && v <= high);
      const { fits } = found.diffusion;
      const last = BATCHES.filter((at) => at <= fits).at(-1) ?? 1; // the dotted line begins where the full one ends
      chart.replaceChildren(
        ...ticks.flatMap((value) => [
          s("line", { class: "dg-rule", x1: left, x2: right, y1: y(value), y2: y(value) }),
          label(value, left - 6, y(value) + 4, "end"),
        ]),
        ...[1, 4, 16, 64, 256].map((at) => label(at, x(at), bottom + 16)),
        label("requests at once", (left + right) / 2, bottom + 31),
        s("line", { class: "dg-bound", x1: left, x2: right, y1: y(1), y2: y(1) }),
        path("dg-entropy", (at) => at >= last),
        path("dg-sum", (at) => at <= fits),
        s("circle", { class: "dg-here", cx: x(load.batch), cy: y(found.speedup), r: 5 }),
      );
      chart.setAttribute(
        "aria-label",
        `At ${requests(load.batch)} at once the ratio is ${plain(found.speedup)}; it falls from ${plain(curve[0])} at 1 to ${plain(curve.at(-1))} at ${BATCHES.at(-1)}`,
      );
    }

    el.classList.add("dglab-host");
    el.replaceChildren(root);
    update();
    new ResizeObserver(() => drawn()).observe(chart);
  }

  if (document.currentScript) {
    document.querySelectorAll(".dglab-cost-explorer").forEach((el) => mount(el, JSON.parse(el.dataset.model)));
  }
  return { compare, answer, mount };
})();
