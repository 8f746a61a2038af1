/* Draws the plotly figures of a page, from the JSON that publish.py left in each `div.dglab-plot`.

   A classic script, so that it works from file://. plotly.min.js (4.8 MB) lies beside it in vendor/ and is loaded only
   when a figure comes near the view. Figures hold no colours of the page: they are taken from its style sheet here,
   again each time the reader changes the theme. What a figure's author coloured stays as it is. */
(function () {
  "use strict";

  const PLOTLY = new URL("vendor/plotly.min.js", document.currentScript.src).href;
  const NEAR = "600px"; // how far below the view a figure is drawn
  const NARROW = 560; // px; below it a legend beside the figure would take half of it
  let library = null; // one promise for the whole page

  function plotly() {
    library =
      library ||
      new Promise(function (resolve, reject) {
        const script = document.createElement("script");
        script.src = PLOTLY;
        script.onload = function () { resolve(window.Plotly); };
        script.onerror = function () { reject(new Error("plotly.min.js is missing beside the page")); };
        document.head.appendChild(script);
      });
    return library;
  }

  function cssColour(name, fallback) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim() || fallback;
  }

  function given(layout, path) {
    return path.split(".").reduce(function (node, key) { return node === undefined || node === null ? undefined : node[key]; }, layout);
  }

  /* The page's colours as a flat plotly layout, for the axes and boxes that the drawn figure has. */
  function themed(figure) {
    const text = cssColour("--pst-color-text-base", "#222");
    const lines = cssColour("--dglab-plot-grid", "#ddd");
    const zero = cssColour("--dglab-plot-zero", "#999");
    const surface = cssColour("--pst-color-surface", "#fff");
    const wanted = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      "font.color": text,
      "title.font.color": text,
      "legend.bgcolor": "rgba(0,0,0,0)",
      "legend.font.color": text,
      "hoverlabel.bgcolor": surface,
      "hoverlabel.bordercolor": lines,
      "hoverlabel.font.color": text,
      "modebar.bgcolor": "rgba(0,0,0,0)",
      "modebar.color": zero,
      "modebar.activecolor": text,
    };
    const full = figure.drawn || {};
    Object.keys(full).forEach(function (key) {
      if (/^[xy]axis\d*$/.test(key)) {
        wanted[key + ".gridcolor"] = lines;
        wanted[key + ".zerolinecolor"] = zero;
        wanted[key + ".linecolor"] = zero;
        wanted[key + ".tickfont.color"] = text;
        wanted[key + ".title.font.color"] = text;
      } else if (/^coloraxis\d*$/.test(key)) {
        wanted[key + ".colorbar.tickfont.color"] = text;
        wanted[key + ".colorbar.title.font.color"] = text;
      }
    });
    (figure.layout.annotations || []).forEach(function (annotation, i) {
      if (given(annotation, "font.color") === undefined) wanted["annotations[" + i + "].font.color"] = text;
    });
    ["sliders", "updatemenus"].forEach(function (kind) {
      (figure.layout[kind] || []).forEach(function (_, i) {
        wanted[kind + "[" + i + "].font.color"] = text;
        wanted[kind + "[" + i + "].bgcolor"] = surface;
        wanted[kind + "[" + i + "].bordercolor"] = lines;
      });
    });
    const update = {};
    Object.keys(wanted).forEach(function (path) {
      if (given(figure.layout, path) === undefined) update[path] = wanted[path];
    });
    return update;
  }

  /* plotly does not wrap an axis title; a line of 36 characters fits a phone. */
  function wrapped(text) {
    return text.replace(/(?=.{37})(.{1,36})\s/g, "$1<br>");
  }

  /* What a phone needs: a legend that stands beside the figure goes below it, and no room is lost at the sides. */
  function narrowed(layout, width) {
    if (width >= NARROW) return layout;
    const fitted = Object.assign({}, layout);
    const legend = Object.assign({}, given(layout, "template.layout.legend"), layout.legend);
    if (legend.orientation !== "h") {
      fitted.legend = Object.assign(legend, { orientation: "h", x: 0, xanchor: "left", y: -0.22, yanchor: "top" });
    }
    fitted.margin = Object.assign({}, layout.margin, { l: 52, r: 12 });
    Object.keys(layout).forEach(function (key) {
      const text = /^xaxis\d*$/.test(key) && given(layout, key + ".title.text");
      if (text) fitted[key] = Object.assign({}, layout[key], { title: Object.assign({}, layout[key].title, { text: wrapped(text) }) });
    });
    return fitted;
  }

  function draw(element) {
    const figure = JSON.parse(element.querySelector('script[type="application/json"]').textContent);
    const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
    const layout = Object.assign({}, narrowed(figure.layout, element.clientWidth), { autosize: true, width: undefined });
    plotly()
      .then(function (Plotly) {
        // plotly writes into the layout it is given; `figure.layout` stays the author's.
        return Plotly.newPlot(element, figure.data, JSON.parse(JSON.stringify(layout)), config).then(function () {
          const restyle = function () {
            return Plotly.relayout(element, themed({ layout: figure.layout, drawn: element._fullLayout }));
          };
          new MutationObserver(restyle).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
          // plotly's own `responsive` hears the window alone, not a side bar or a late font that changes the column.
          new ResizeObserver(function () {
            if (element.clientWidth && element.clientWidth !== element._fullLayout.width) Plotly.Plots.resize(element);
          }).observe(element);
          return restyle();
        });
      })
      .then(function () { element.dataset.drawn = "yes"; })
      .catch(function (error) {
        const note = document.createElement("p");
        note.textContent = "This figure could not be drawn: " + error.message;
        element.appendChild(note);
      });
  }

  function start() {
    const observer = new IntersectionObserver(
      function (entries) {
        entries.filter(function (entry) { return entry.isIntersecting; }).forEach(function (entry) {
          observer.unobserve(entry.target);
          draw(entry.target);
        });
      },
      { rootMargin: NEAR }
    );
    document.querySelectorAll("div.dglab-plot").forEach(function (element) { observer.observe(element); });
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
