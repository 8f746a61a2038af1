/* The canvas viewer: one or two recorded canvases, step by step.

   One file, two hosts. On a page it is a classic script: it fills every <div class="dglab-canvas" data-run="..."> with
   the run that the attribute holds, with no kernel and no request. In JupyterLab, report/viewer.py appends three lines
   that make it an anywidget module. Both call `mount`; neither knows of the other. What `data-run` holds is written by
   report/canvas_payload.py and unpacked by `unpack`.

   Token text is data: it reaches the page through `textContent` alone. */

const dglabCanvas = (() => {
  "use strict";

  const VERSION = 1;
  const MILLISECONDS_A_STEP = 220;
  const STATES = {
    first: "accepted for the first time",
    again: "accepted again",
    dropped: "no longer accepted",
    open: "not accepted",
  };

  // -- unpacking -------------------------------------------------------------------------------------------------

  const inflate = async (bytes) => {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };

  /** One run: the header's fields, and `argmax`, `current` (token ids; -1 = left out), `accepted`, `entropy`, `kl`
      (nats; null without) with one value a cell, step after step; `text`, a Map from id to text. */
  async function unpack(base64) {
    const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    const lengths = new DataView(bytes.buffer);
    const deflated = [];
    for (let at = 0; at < bytes.length;) {
      const end = at + 4 + lengths.getUint32(at, true);
      deflated.push(bytes.subarray(at + 4, end));
      at = end;
    }
    const sections = await Promise.all(deflated.map(inflate));
    const json = () => JSON.parse(new TextDecoder().decode(sections.shift()));

    const run = json();
    if (run.version !== VERSION) throw new Error(`run packed as version ${run.version}, this viewer reads ${VERSION}`);
    const { steps, length } = run;
    const cells = steps * length;
    const ids = runningSums(sections.shift());
    const texts = json();
    run.text = new Map(texts.map((text, rank) => [ids[rank], text]).filter(([, text]) => text !== 0));

    const bits = sections.shift();
    run.accepted = new Uint8Array(cells);
    for (let i = 0; i < cells; i++) {
      run.accepted[i] = ((bits[i >> 3] >> (i & 7)) & 1) ^ (i < length ? 0 : run.accepted[i - length]);
    }
    const ranks = () => {
      const planes = sections.splice(0, run.planes);
      return Uint32Array.from({ length: cells }, (_, i) =>
        planes.reduce((sum, plane, k) => sum + plane[i] * 256 ** k, 0),
      );
    };
    const idOf = (rank) => ids[rank - 1];
    const argmax = ranks();
    run.argmax = new Int32Array(cells);
    for (let i = 0; i < cells; i++) run.argmax[i] = argmax[i] ? idOf(argmax[i]) : run.argmax[i - length];
    run.current = new Int32Array(cells).fill(-1);
    if (run.currentKept !== "none") {
      const current = ranks();
      for (let i = 0; i < cells; i++) {
        if (current[i]) run.current[i] = idOf(current[i]);
        else if (isKept(run, i)) run.current[i] = run.argmax[i - length];
      }
    }
    const values = (top) => {
      const level = sections.shift();
      for (let i = length; i < cells; i++) level[i] += level[i - length];
      return Float32Array.from(level, (q) => top * (q / run.levels) ** 2);
    };
    run.entropy = values(run.entropyTop);
    run.kl = run.klTop === null ? null : values(run.klTop);
    return run;
  }

  /** The numbers whose differences are in LEB128. */
  function runningSums(bytes) {
    const sums = [];
    let sum = 0,
      number = 0,
      weight = 1;
    for (const byte of bytes) {
      number += (byte & 127) * weight;
      weight *= 128;
      if (byte < 128) {
        sums.push((sum += number));
        number = 0;
        weight = 1;
      }
    }
    return sums;
  }

  /** Whether the current token of cell i (an index into all steps) was accepted by the step before. */
  const isKept = (run, i) => i >= run.length && run.accepted[i - run.length] === 1;

  // -- what a cell says ------------------------------------------------------------------------------------------

  const SIGNS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽", "\u007f": "␡" };
  const UNSEEN = /[\u0000-\u0020\u007f-\u00a0\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

  /** Text with its spaces, line ends and control characters made visible. */
  function visible(text) {
    const sign = (c) =>
      SIGNS[c] ?? (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : `‹${c.charCodeAt(0).toString(16)}›`);
    return text === "" ? "∅" : text.replace(UNSEEN, sign);
  }

  /** The same for running text: spaces inside a word token stay spaces, a line end breaks the line. */
  const flowing = (text) =>
    /^ +$/.test(text)
      ? text.replace(/ /g, "␣")
      : text
          .split(/([ \n])/)
          .map((part) => (part === " " ? " " : part === "\n" ? "⏎\n" : part && visible(part)))
          .join("") || "∅";

  const nats = (value) =>
    value === 0 ? "0" : value < 0.001 ? "< 0.001" : value < 1 ? value.toPrecision(2) : value.toFixed(2);

  /** Everything there is to say of position `at` of a run at a step that the run has. */
  function describe(run, step, at) {
    const i = step * run.length + at;
    const now = run.accepted[i],
      before = isKept(run, i);
    const state = now ? (run.firstAccept[at] === step ? "first" : "again") : before ? "dropped" : "open";
    const token = (id) => ({ id, text: id < 0 ? null : (run.text.get(id) ?? null) });
    return {
      state,
      kept: before,
      entropy: run.entropy[i],
      kl: run.kl?.[i],
      argmax: token(run.argmax[i]),
      current: token(run.current[i]),
    };
  }

  const shown = ({ id, text }) => (text !== null ? visible(text) : id < 0 ? "░" : String(id));

  function firstAccepts(run) {
    const first = new Int32Array(run.length).fill(-1);
    for (let i = run.accepted.length - 1; i >= 0; i--)
      if (run.accepted[i]) first[i % run.length] = Math.floor(i / run.length);
    return first;
  }

  const countAccepted = (run, step) =>
    run.accepted.subarray(step * run.length, (step + 1) * run.length).reduce((sum, bit) => sum + bit, 0);

  /** Columns of a nearly square grid: the smallest divisor from the root up, unless that is a long thin strip. */
  function columnsFor(length) {
    const root = Math.ceil(Math.sqrt(length));
    for (let columns = root; columns <= 2 * root; columns++) if (length % columns === 0) return columns;
    return root;
  }

  // -- building blocks -------------------------------------------------------------------------------------------

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null) node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }
  const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const icon = (path) => s("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, s("path", { d: path }));
  const PLAY = "M2 1v12l11-6z",
    PAUSE = "M2 1h4v12H2zM8 1h4v12H8z",
    BACK = "M11 1v12L3 7zM1 1h2v12H1z",
    NEXT = "M3 1v12l8-6zM11 1h2v12h-2z";

  let instances = 0;

  /** A row of radio buttons: { value: label }. Returns the node and a function that shows a value. */
  function choice(caption, options, onPick) {
    const name = `dglab-${++instances}`;
    const inputs = Object.keys(options).map((value) =>
      h("input", { type: "radio", name, value, onchange: () => onPick(value) }),
    );
    const labels = inputs.map((input) => h("label", {}, input, h("span", {}, options[input.value])));
    const node = h(
      "fieldset",
      { class: "dg-choice" },
      h("legend", { class: "dg-hidden" }, caption),
      h("span", { "aria-hidden": "true" }, caption),
      h("div", { class: "dg-segments" }, ...labels),
    );
    return { node, inputs, show: (value) => inputs.forEach((input) => (input.checked = input.value === value)) };
  }

  // -- one run: heading, per-step line, cells ----------------------------------------------------------------------

  function runPanel(run, title, columns) {
    const done = h("span", { class: "dg-done" });
    const stats = h("dl"); // no class: the book's theme would indent it
    const cells = Array.from({ length: run.length }, (_, at) =>
      h("div", { class: "dg-cell", role: "gridcell", tabindex: "-1", "data-at": at }),
    );
    const rows = [];
    for (let at = 0; at < run.length; at += columns)
      rows.push(h("div", { class: "dg-row", role: "row" }, ...cells.slice(at, at + columns)));
    const grid = h(
      "div",
      {
        class: "dg-grid",
        role: "grid",
        "aria-label": `${title}, ${run.length} positions`,
        style: `--dg-columns:${columns}`,
      },
      ...rows,
    );
    const node = h("section", { class: "dg-run", "aria-label": title }, h("h4", {}, title, done), stats, grid);

    const stat = (name, value, unit = "") => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, unit)));

    function draw(state, scaleTop) {
      const step = Math.min(state.step, run.steps - 1);
      const last = step === run.steps - 1;
      done.textContent = last ? (run.stopped ? "done: the stop test fired" : "done: no steps left") : "";
      const temperature = run.temperature[step];
      stats.replaceChildren(
        stat("step", step + 1, ` of ${run.steps}`),
        stat("temperature", temperature === null ? "none" : temperature.toFixed(2)),
        stat("mean entropy", run.meanEntropy[step] === null ? "none" : nats(run.meanEntropy[step]), " nats"),
        stat("accepted", countAccepted(run, step), ` of ${run.length}`),
        stat("stable", run.stable[step] ? "yes" : "no"),
        stat("confident", run.confident[step] ? "yes" : "no"),
      );
      grid.dataset.view = state.view;
      grid.dataset.colour = state.colour;
      const text =
        state.view === "text" ? (token) => (token.text !== null ? flowing(token.text) : `${shown(token)} `) : shown;
      cells.forEach((cell, at) => {
        const said = describe(run, step, at);
        const token = said[state.token];
        const noise = state.token === "current" && !said.kept;
        cell.textContent = text(token);
        cell.dataset.state = said.state;
        cell.toggleAttribute("data-noise", noise);
        const value = { entropy: said.entropy, kl: said.kl }[state.colour] ?? 0;
        cell.style.setProperty("--dg-share", Math.sqrt(value / (scaleTop || 1)).toFixed(3));
        cell.classList.toggle("dg-chosen", at === state.cell);
        cell.tabIndex = at === Math.max(state.cell, 0) ? 0 : -1;
        cell.setAttribute(
          "aria-label",
          `position ${at}: ${shown(token)}${noise ? ", random" : ""}, entropy ${nats(said.entropy)} nats, ${STATES[said.state]}`,
        );
      });
    }
    return { node, cells, draw };
  }

  // -- under the scrubber: accepted a step, mean entropy -------------------------------------------------------------

  function sparkline(run, steps, top, onStep) {
    const x = (step) => (steps > 1 ? (100 * step) / (steps - 1) : 50);
    const path = (values) => values.map((value, step) => `${step ? "L" : "M"}${x(step)} ${34 - 32 * value}`).join("");
    const accepted = Array.from({ length: run.steps }, (_, step) => countAccepted(run, step) / run.length);
    const now = s("path", { class: "dg-now" });
    const pick = (event) => {
      const box = node.getBoundingClientRect();
      onStep(Math.round(((event.clientX - box.left) / box.width) * (steps - 1)));
    };
    const node = s(
      "svg",
      {
        class: "dg-spark",
        viewBox: "0 0 100 34",
        preserveAspectRatio: "none",
        "aria-hidden": "true",
        onpointerdown: (event) => {
          node.setPointerCapture(event.pointerId);
          pick(event);
        },
        onpointermove: (event) => {
          if (event.buttons) pick(event);
        },
      },
      s("path", { class: "dg-area", d: `M0 34L${path(accepted).slice(1)}L${x(run.steps - 1)} 34Z` }),
      s("path", { class: "dg-line", d: path(run.meanEntropy.map((value) => (value ?? 0) / (top || 1))) }),
      now,
    );
    return { node, draw: (step) => now.setAttribute("d", `M${x(step)} 0V34`) };
  }

  // -- the viewer --------------------------------------------------------------------------------------------------

  /** Builds the viewer in `el`.
      packed: { run, other }, base64; state: any of step, cell (-1 = none), view, colour, token; onChange(name, value)
      hears what the reader changes. Resolves to { set(changes), state, runs, destroy() }. */
  async function mount(el, packed, state = {}, onChange = () => {}) {
    const runs = await Promise.all([packed.run, packed.other].filter(Boolean).map(unpack));
    runs.forEach((run) => (run.firstAccept = firstAccepts(run)));
    return build(el, runs, { step: 0, cell: -1, view: "grid", colour: "accept", token: "argmax", ...state }, onChange);
  }

  function build(el, runs, state, onChange) {
    const steps = Math.max(...runs.map((run) => run.steps));
    const { length } = runs[0];
    const columns = columnsFor(length);
    const tops = {
      entropy: Math.max(...runs.map((run) => run.entropyTop)),
      kl: Math.max(...runs.map((run) => run.klTop ?? 0)),
    };
    const meanTop = Math.max(...runs.flatMap((run) => run.meanEntropy));
    const hasKl = runs.every((run) => run.kl);
    const hasCurrent = runs.every((run) => run.currentKept !== "none");
    const titles = runs.map((run, k) => run.label || (runs.length > 1 ? `Run ${"AB"[k]}` : "Canvas"));
    let hovered = -1,
      timer = null,
      speaking = null;

    // Changes come from the reader (told to the host) or from the host (not echoed back to it).
    function set(changes, fromReader = false) {
      const before = { ...state };
      Object.assign(state, changes);
      state.step = Math.min(Math.max(state.step, 0), steps - 1);
      state.cell = Math.min(Math.max(state.cell, -1), length - 1);
      const changed = Object.keys(state).filter((name) => state[name] !== before[name]);
      if (!changed.length) return;
      draw();
      if (fromReader) changed.forEach((name) => onChange(name, state[name]));
    }
    const pick = (changes) => set(changes, true);
    const go = (step) => {
      pause();
      pick({ step });
    };

    function play() {
      if (state.step >= steps - 1) pick({ step: 0 });
      timer = setInterval(() => {
        if (!el.isConnected) return pause();
        pick({ step: state.step + 1 });
        if (state.step >= steps - 1) pause();
      }, MILLISECONDS_A_STEP);
      drawPlay();
    }
    function pause() {
      if (timer === null) return;
      clearInterval(timer);
      timer = null;
      drawPlay();
      speak();
    }
    const toggle = () => (timer === null ? play() : pause());

    // The parts.
    const token = choice("Show", { argmax: "best guess", current: "canvas as read" }, (value) =>
      pick({ token: value }),
    );
    const view = choice("as", { grid: "grid", text: "text" }, (value) => pick({ view: value }));
    const colour = choice(
      "Colour by",
      { accept: "acceptance", entropy: "entropy", ...(hasKl ? { kl: "KL to final" } : {}) },
      (value) => pick({ colour: value }),
    );
    token.inputs[1].disabled = !hasCurrent;
    const note = h("p", { class: "dg-note" });
    const panels = runs.map((run, k) => runPanel(run, titles[k], columns));
    const sparks = runs.map((run) => sparkline(run, steps, meanTop, go));
    const back = h(
      "button",
      { type: "button", "aria-label": "One step back", onclick: () => go(state.step - 1) },
      icon(BACK),
    );
    const next = h(
      "button",
      { type: "button", "aria-label": "One step on", onclick: () => go(state.step + 1) },
      icon(NEXT),
    );
    const playing = h("button", { type: "button", class: "dg-play", onclick: toggle });
    const scrub = h("input", {
      type: "range",
      min: 0,
      max: steps - 1,
      step: 1,
      "aria-label": "Denoising step",
      oninput: () => go(Number(scrub.value)),
    });
    const legend = h("div", { class: "dg-legend" });
    const detail = h("div", { class: "dg-detail" });
    const live = h("p", { class: "dg-hidden", "aria-live": "polite" });
    const key = h(
      "p",
      { class: "dg-note", "aria-hidden": "true" },
      h("i", { class: "dg-key dg-area" }),
      `accepted a step, of ${length} \u2002 `,
      h("i", { class: "dg-key dg-line" }),
      `mean entropy, top ${nats(meanTop)} nats`,
    );
    const root = h(
      "div",
      { class: "dglab", role: "group", "aria-label": "Canvas viewer", "data-lm-suppress-shortcuts": "true" },
      h("div", { class: "dg-bar" }, token.node, view.node, colour.node),
      note,
      h("div", { class: runs.length > 1 ? "dg-runs dg-two" : "dg-runs" }, ...panels.map((panel) => panel.node)),
      h(
        "div",
        { class: "dg-player" },
        h("div", { class: "dg-buttons" }, back, playing, next),
        h("div", { class: "dg-track" }, scrub, ...sparks.map((spark) => spark.node), key),
      ),
      legend,
      detail,
      live,
    );

    // Drawing.
    function draw() {
      token.show(state.token);
      view.show(state.view);
      colour.show(state.colour);
      note.textContent = explain();
      panels.forEach((panel) => panel.draw(state, tops[state.colour]));
      sparks.forEach((spark) => spark.draw(state.step));
      scrub.value = state.step;
      scrub.setAttribute("aria-valuetext", summary());
      back.disabled = state.step === 0;
      next.disabled = state.step === steps - 1;
      drawLegend();
      drawDetail();
      if (timer === null) speak();
    }
    function drawPlay() {
      playing.replaceChildren(icon(timer === null ? PLAY : PAUSE));
      playing.setAttribute("aria-label", timer === null ? "Play" : "Pause");
    }
    function explain() {
      const left = runs.some((run) => run.currentKept === "kept")
        ? " The ids of random tokens are left out of this page (░) to keep it small."
        : "";
      if (state.token === "current")
        return `Canvas as read: what the model is given at this step. Accepted tokens stay from the step before; all others are random (italic).${left}`;
      const no = hasCurrent ? "" : " The canvas as read is left out of this page to keep it small.";
      return `Best guess: the model's most likely token (argmax) at every position. The last step's is the answer.${no}`;
    }
    function drawLegend() {
      if (state.colour === "accept") {
        const swatch = (name) => h("span", {}, h("i", { class: "dg-cell", "data-state": name }), STATES[name]);
        return legend.replaceChildren(...Object.keys(STATES).map(swatch));
      }
      const top = tops[state.colour];
      const ticks =
        top > 0
          ? [0, 0.04, 0.25, 0.5625, 1].map((share) =>
              h("b", { style: `left:${100 * Math.sqrt(share)}%` }, nats(share * top)),
            )
          : [h("b", { style: "left:0" }, "0")];
      legend.replaceChildren(
        h("span", {}, { entropy: "entropy, nats", kl: "KL to the final distribution, nats" }[state.colour]),
        h("div", { class: "dg-scale" }, h("i"), ...ticks),
        h("span", {}, "bar below: accepted now \u00b7 corner: for the first time \u00b7 dashes: no longer"),
      );
    }
    function drawDetail() {
      const at = hovered >= 0 ? hovered : state.cell;
      panels.forEach((panel) => panel.cells.forEach((cell, i) => cell.classList.toggle("dg-hovered", i === hovered)));
      if (at < 0) {
        const keys = [
          ["Space", "plays"],
          ["← →", "step"],
          [", .", "step while in the grid"],
        ].flatMap(([keyName, does]) => [h("kbd", {}, keyName), ` ${does} \u2002 `]);
        return detail.replaceChildren(
          h(
            "p",
            { class: "dg-note" },
            "Point at a cell to see its token, or tab into the grid and move with the arrow keys.",
            h("br"),
            ...keys,
          ),
        );
      }
      detail.replaceChildren(...runs.map((run, k) => inDetail(run, titles[k], at)));
    }
    function inDetail(run, title, at) {
      const said = describe(run, Math.min(state.step, run.steps - 1), at);
      const named = (it) =>
        it.id < 0
          ? ["random, left out of this page"]
          : [h("bdi", { class: "dg-token" }, shown(it)), it.text === null ? "" : ` id ${it.id}`];
      const origin = said.kept ? " · from the step before" : " · random";
      const first = run.firstAccept[at];
      const lines = [
        ["position", [`${at}`, runs.length > 1 ? ` · ${title}` : ""]],
        ["best guess", named(said.argmax)],
        [
          "canvas as read",
          hasCurrent ? [...named(said.current), said.current.id < 0 ? "" : origin] : ["left out of this page"],
        ],
        ["entropy", [`${nats(said.entropy)} nats`]],
        ...(run.kl ? [["KL to final", [`${nats(said.kl)} nats`]]] : []),
        ["accepted", [STATES[said.state], said.state === "first" || first < 0 ? "" : ` · first at step ${first + 1}`]],
      ];
      return h("dl", {}, ...lines.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, ...value)]));
    }
    function summary() {
      return runs
        .map((run, k) => {
          const step = Math.min(state.step, run.steps - 1);
          const over = step === run.steps - 1 ? ", done" : "";
          return `${runs.length > 1 ? `${titles[k]}: ` : ""}step ${step + 1} of ${run.steps}, ${countAccepted(run, step)} of ${run.length} accepted, mean entropy ${nats(run.meanEntropy[step] ?? 0)} nats${over}`;
        })
        .join("; ");
    }
    // Said once things have been still for a moment, and not while playing.
    function speak() {
      clearTimeout(speaking);
      speaking = setTimeout(() => {
        if (timer === null) live.textContent = summary();
      }, 400);
    }

    // Input.
    const cellOf = (event) => event.target.closest?.("[data-at]");
    root.addEventListener("pointerover", (event) => {
      hovered = Number(cellOf(event)?.dataset.at ?? -1);
      drawDetail();
    });
    root.addEventListener("pointerleave", () => {
      hovered = -1;
      drawDetail();
    });
    root.addEventListener("focusin", (event) => {
      const cell = cellOf(event);
      if (cell) pick({ cell: Number(cell.dataset.at) });
    });
    root.addEventListener("keydown", (event) => {
      if (event.altKey || event.metaKey || !onKey(event)) return;
      event.preventDefault();
      event.stopPropagation();
    });

    /** Acts on a key; true when it was one of ours. */
    function onKey({ key, target, ctrlKey }) {
      if (key === ",") return (go(state.step - 1), true);
      if (key === ".") return (go(state.step + 1), true);
      if (key === " " && !target.matches("button, [type=radio]")) return (toggle(), true);
      const cell = target.closest("[data-at]");
      if (cell) return moveFrom(cell, key, ctrlKey);
      if (target.matches("input")) return false; // radio buttons and the scrubber have their own arrow keys
      const step = { ArrowLeft: state.step - 1, ArrowRight: state.step + 1, Home: 0, End: steps - 1 }[key];
      if (step === undefined) return false;
      return (go(step), true);
    }
    function moveFrom(cell, key, ctrlKey) {
      const at = Number(cell.dataset.at);
      const { cells } = panels.find((panel) => panel.node.contains(cell));
      const row = at - (at % columns);
      const target = {
        ArrowLeft: at - 1,
        ArrowRight: at + 1,
        ArrowUp: at - columns,
        ArrowDown: at + columns,
        Home: ctrlKey ? 0 : row,
        End: ctrlKey ? cells.length - 1 : Math.min(row + columns, cells.length) - 1,
      }[key];
      if (target === undefined) return false;
      cells[target]?.focus();
      return true;
    }

    drawPlay();
    draw();
    el.classList.add("dglab-host");
    el.replaceChildren(root);
    return {
      set,
      state,
      runs,
      destroy: () => {
        pause();
        clearTimeout(speaking);
      },
    };
  }

  // -- the two hosts -----------------------------------------------------------------------------------------------

  /** anywidget: the traitlets of report/viewer.py's CanvasViewer follow the viewer, and the viewer follows them. */
  async function render({ model, el }) {
    const names = ["step", "cell", "view", "colour", "token"];
    const state = Object.fromEntries(names.map((name) => [name, model.get(name)]));
    const viewer = await mount(el, { run: model.get("_run"), other: model.get("_other") }, state, (name, value) => {
      model.set(name, value);
      model.save_changes();
    });
    const follow = names.map((name) => [`change:${name}`, () => viewer.set({ [name]: model.get(name) })]);
    follow.forEach(([event, listener]) => model.on(event, listener));
    return () => {
      follow.forEach(([event, listener]) => model.off(event, listener));
      viewer.destroy();
    };
  }

  /** A page: what is inside the div stays there, readable, when the run cannot be unpacked. */
  async function hydrate(el) {
    try {
      const { run, other, state } = el.dataset;
      el.dglab = await mount(el, { run, other }, JSON.parse(state ?? "{}"));
    } catch (error) {
      el.append(h("p", {}, `The interactive viewer could not start here: ${error.message}`));
    }
  }

  // A module has no current script: in JupyterLab only widgets are drawn, not what other outputs hold.
  if (document.currentScript) document.querySelectorAll(".dglab-canvas").forEach(hydrate);

  return { mount, render, unpack };
})();
