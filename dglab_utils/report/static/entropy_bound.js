/* The entropy-bound rule, to be played with: the confidence ramp (sampling/ramp.py), its temperature schedule, the accept
   rule and the stop test, worked out afresh for every position of three sliders.

   A classic script for pages: it fills every <div class="dglab-entropy-bound" data-ramp="..."> (report/explorable.py).
   `rule` is the whole of the arithmetic and knows nothing of the page; the tests hold it against the official sampler.
   It computes in double precision where the sampler computes in single. Equal entropies are taken in the order of their
   positions, where the sampler's sort leaves the order open. */

const dglabEntropyBound = (() => {
  "use strict";

  /** All steps of one run, up to the one at which the stop test fires or the steps are used up.

      ramp: { difficulty [L], targets [L], hardness, vocabSize, steps, tMin, tMax, threshold (nats) };
      growth: logits a step; bound: nats.
      Each step: temperature; entropy [L], nats; order [L], positions by ascending entropy; before [L], the sum of the
      entropies of those ahead in that order; accepted [L], 0 or 1; count; mean, nats; stopped. */
  function rule(ramp, growth, bound) {
    const run = [];
    let argmaxBefore = null;
    for (let elapsed = 0; elapsed < ramp.steps; elapsed++) {
      const temperature = ramp.tMin + (ramp.tMax - ramp.tMin) * ((ramp.steps - elapsed) / ramp.steps);
      const logits = ramp.difficulty.map((d) => Math.max(0, growth * elapsed - ramp.hardness * d));
      const entropy = logits.map((logit) => entropyOf(logit / temperature, ramp.vocabSize));
      const order = [...entropy.keys()].sort((a, b) => entropy[a] - entropy[b]);
      const before = [];
      const accepted = new Array(entropy.length).fill(0);
      let sum = 0;
      for (const position of order) {
        before.push(sum);
        if (sum <= bound) accepted[position] = 1;
        sum += entropy[position];
      }
      const mean = sum / entropy.length;
      const argmax = logits.map((logit, position) => (logit > 0 ? ramp.targets[position] : 0)); // all equal: the first token
      const stable = argmaxBefore !== null && argmax.every((token, position) => token === argmaxBefore[position]);
      const stopped = stable && mean < ramp.threshold;
      run.push({
        temperature,
        entropy,
        order,
        before,
        accepted,
        count: accepted.reduce((a, b) => a + b),
        mean,
        stopped,
      });
      if (stopped) break;
      argmaxBefore = argmax;
    }
    return run;
  }

  /** Entropy, nats, of the softmax of one logit z >= 0 and vocabSize - 1 zeros. */
  function entropyOf(z, vocabSize) {
    const rest = (vocabSize - 1) * Math.exp(-z); // all other tokens' weight, the target's being 1
    return Math.log1p(rest) + (z * rest) / (1 + rest);
  }

  // -- the page ----------------------------------------------------------------------------------------------------

  const GROWTH = { from: -2, to: 3, step: 0.125, value: (x) => 2 ** x, at: Math.log2 }; // 0.25 to 8
  const BOUND = { from: -3, to: 2, step: 0.1, value: (x) => 10 ** x, at: Math.log10 }; // 0.001 to 100
  const FLOOR = 1e-4,
    CEILING = 3000; // of the chart, nats

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }
  const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const plain = (value) => String(Number(value.toPrecision(2)));

  function dial(caption, low, high, step, onInput) {
    const input = h("input", { type: "range", min: low, max: high, step, "aria-label": caption });
    const shown = h("b", { "aria-hidden": "true" });
    input.addEventListener("input", onInput);
    return {
      node: h("label", {}, h("span", {}, caption, shown), input),
      input,
      say(text) {
        shown.textContent = text;
        input.setAttribute("aria-valuetext", text);
      },
    };
  }

  /** Builds the explorable in `el`; ramp as `rule` wants it, with growth and bound to begin with. */
  function mount(el, ramp) {
    const length = ramp.difficulty.length;
    const growth = dial("growth", GROWTH.from, GROWTH.to, GROWTH.step, () => update());
    const bound = dial("entropy bound", BOUND.from, BOUND.to, BOUND.step, () => update());
    const step = dial("step", 1, ramp.steps, 1, () => draw());
    const says = h("p", { class: "dg-says" });
    const live = h("p", { class: "dg-hidden", "aria-live": "polite" });
    const chart = s("svg", { class: "dg-chart", role: "img" });
    const cells = Array.from({ length }, () => h("i", { class: "dg-cell" }));
    const columns = Math.ceil(Math.sqrt(length));
    const grid = h(
      "div",
      { class: "dg-grid dg-square", role: "img", "data-colour": "accept", style: `--dg-columns:${columns}` },
      ...cells,
    );
    const key = (kind, text) => h("span", {}, h("i", { class: `dg-key dg-key-${kind}` }), text);
    const state = (name, text) => h("span", {}, h("i", { class: "dg-cell", "data-state": name }), text);
    const root = h(
      "div",
      { class: "dglab", role: "group", "aria-label": "The entropy-bound rule" },
      h("div", { class: "dg-dials" }, growth.node, bound.node, step.node),
      says,
      h(
        "div",
        { class: "dg-pair" },
        h(
          "figure",
          {},
          chart,
          h(
            "figcaption",
            {},
            "All positions, most certain first. A position is accepted while the entropies ahead of it sum to no more than the bound.",
            h(
              "span",
              { class: "dg-legend" },
              key("sum", "sum ahead of it"),
              key("entropy", "its own entropy"),
              key("bound", "bound"),
            ),
          ),
        ),
        h(
          "figure",
          {},
          grid,
          h(
            "figcaption",
            {},
            "The canvas at this step.",
            h(
              "span",
              { class: "dg-legend" },
              state("first", "first time"),
              state("again", "again"),
              state("dropped", "no longer"),
              state("open", "not accepted"),
            ),
          ),
        ),
      ),
      live,
    );
    growth.input.value = GROWTH.at(ramp.growth);
    bound.input.value = BOUND.at(ramp.bound);
    let run = [],
      speaking = null;

    function update() {
      run = rule(ramp, GROWTH.value(Number(growth.input.value)), BOUND.value(Number(bound.input.value)));
      step.input.max = run.length;
      draw();
    }

    function draw() {
      const at = Number(step.input.value) - 1;
      const now = run[at];
      const nats = BOUND.value(Number(bound.input.value));
      growth.say(`${plain(GROWTH.value(Number(growth.input.value)))} logits a step`);
      bound.say(`${plain(nats)} nats`);
      step.say(`${at + 1} of ${run.length}`);
      const end = run.at(-1).stopped
        ? `stops after ${run.length} steps`
        : `all ${run.length} steps pass without a stop`;
      says.textContent = `At step ${at + 1}, ${now.count} of ${length} are accepted; ${end}.`;
      clearTimeout(speaking);
      speaking = setTimeout(() => (live.textContent = says.textContent), 500);
      const first = (position) => run.findIndex(({ accepted }) => accepted[position]) === at;
      cells.forEach((cell, position) => {
        const before = at > 0 && run[at - 1].accepted[position];
        cell.dataset.state = now.accepted[position]
          ? first(position)
            ? "first"
            : "again"
          : before
            ? "dropped"
            : "open";
      });
      grid.setAttribute("aria-label", `${now.count} of ${length} positions accepted at step ${at + 1}`);
      drawChart(now, nats);
    }

    function drawChart({ entropy, order, before, count, mean }, nats) {
      const { width, height } = chart.getBoundingClientRect();
      if (!width) return; // in a closed tab or fold; the observer calls again when it opens
      const left = 42,
        right = width - 6,
        top = 8,
        bottom = height - 34;
      const x = (rank) => left + ((right - left) * rank) / length;
      const share = (value) => Math.log(Math.max(value, FLOOR) / FLOOR) / Math.log(CEILING / FLOOR);
      const y = (value) => bottom - (bottom - top) * share(value);
      const line = (values, kind) =>
        s("path", {
          class: kind,
          d: values
            .map((value, rank) => `${rank ? "L" : "M"}${x(rank + 0.5).toFixed(1)} ${y(value).toFixed(1)}`)
            .join(""),
        });
      const label = (text, at, height, anchor = "middle", kind = "") =>
        s("text", { x: at, y: height, "text-anchor": anchor, class: kind }, text);
      const ticks = [0.001, 0.01, 0.1, 1, 10, 100, 1000].flatMap((value) => [
        s("line", { class: "dg-rule", x1: left, x2: right, y1: y(value), y2: y(value) }),
        label(value, left - 6, y(value) + 4, "end"),
      ]);
      const places = [1, length / 4, length / 2, (3 * length) / 4, length].map(Math.round);
      chart.replaceChildren(
        s("rect", { class: "dg-inside", x: left, y: top, width: x(count) - left, height: bottom - top }),
        ...ticks,
        ...places.map((rank) => label(rank, x(rank - 0.5), bottom + 16)),
        label("position by rank; nats, logarithmic", (left + right) / 2, bottom + 31),
        line(
          order.map((position) => entropy[position]),
          "dg-entropy",
        ),
        line(before, "dg-sum"),
        s("line", { class: "dg-bound", x1: left, x2: right, y1: y(nats), y2: y(nats) }),
      );
      chart.setAttribute(
        "aria-label",
        `${count} of ${length} positions lie within the bound of ${plain(nats)} nats; mean entropy ${plain(mean)} nats`,
      );
    }

    el.classList.add("dglab-host");
    el.replaceChildren(root);
    update();
    step.input.value = Math.round(0.7 * run.length); // where there is most to see
    draw();
    new ResizeObserver(draw).observe(chart);
  }

  if (document.currentScript) {
    document.querySelectorAll(".dglab-entropy-bound").forEach((el) => mount(el, JSON.parse(el.dataset.ramp)));
  }
  return { rule, mount };
})();
