"use strict";
// Curves. Each is drawn when it first comes into view, and again when smoothing, scale, zoom or colours change.

let data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const coarse = matchMedia("(pointer: coarse)").matches; // a finger scrolls; it must not zoom a curve by accident
const narrow = matchMedia("(max-width: 720px)").matches;
const LIGHT = ["#2f5fd0", "#d9702a", "#2a9160", "#a8447f", "#8a6fd1", "#b58a00", "#3a93a8", "#c2483c", "#6b7a86", "#7a5b3a"];
const DARK = ["#7fa4ff", "#f2a267", "#6fcf9a", "#e58fbd", "#b9a4f5", "#e3c257", "#79c7d8", "#f28b7f", "#a5b1bb", "#c6a37c"];
const view = { smoothing: 0, logarithmic: false, range: null, axis: "steps", hidden: new Set() };
const charts = new Map(); // element -> function that draws it

function element(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

const palette = () => (dark.matches ? DARK : LIGHT);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Plotly reads a little HTML in names; a metric's name is only text.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function short(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  if (size >= 100) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

// Exponential moving average, without the pull of its start towards zero; gaps stay gaps.
function smoothed(y, weight) {
  let sum = 0, total = 0;
  return y.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return Number((sum / total).toPrecision(6)); // a constant must stay constant
  });
}

function layout(extra) {
  const soft = css("--soft"), line = css("--line");
  const axis = { color: soft, gridcolor: line, zeroline: false, linecolor: line, automargin: true, tickfont: { size: 11 } };
  return Object.assign({
    margin: { l: 34, r: 10, t: 6, b: 26 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--ink") },
    hovermode: "x unified", hoverlabel: { bgcolor: css("--card"), bordercolor: line, font: { size: 12 } },
    dragmode: coarse ? false : "zoom", showlegend: false,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11.5, color: soft } },
    xaxis: { ...axis, showgrid: false, range: view.range || undefined, autorange: !view.range, nticks: 7, hoverformat: view.axis === "steps" ? ",d" : ",.1f" },
    yaxis: { ...axis, type: view.logarithmic ? "log" : "linear", fixedrange: true, nticks: 6, exponentformat: "e" },
  }, extra);
}

function traces(chart) {
  const colours = palette(), found = [];
  const sparse = (y) => y.filter((value) => value !== null).length <= 30;
  if (chart.band) {
    const edge = { x: data.steps, mode: "lines", line: { width: 0 }, connectgaps: true, hovertemplate: "%{y:.4~g}" };
    found.push({ ...edge, y: chart.band[0], name: "min" });
    found.push({ ...edge, y: chart.band[1], name: "max", fill: "tonexty", fillcolor: colours[0] + "22" });
  }
  chart.lines.forEach((line, i) => {
    if (view.hidden.has(line.run)) return;
    const colour = colours[(data.runs ? line.run : i) % colours.length];
    const base = { x: data.runs ? data.runs[line.run][view.axis] : data.steps, name: plain(line.name), connectgaps: true, hovertemplate: "%{y:.4~g}" };
    const few = sparse(line.y); // validations: each point counts, and is shown as it is
    if (view.smoothing > 0 && !few) {
      found.push({ ...base, y: line.y, mode: "lines", opacity: 0.25, hoverinfo: "skip", hovertemplate: null, showlegend: false, line: { color: colour, width: 1.2 } });
    }
    const y = view.smoothing > 0 && !few ? smoothed(line.y, view.smoothing) : line.y;
    found.push({ ...base, y, mode: few ? "lines+markers" : "lines", line: { color: colour, width: 1.8 }, marker: { color: colour, size: 5 } });
  });
  return found;
}

function shape(chart) {
  const found = layout({ showlegend: !data.runs && chart.lines.length > 1 }); // runs have their legend at the top
  let low = Infinity, high = -Infinity;
  for (const line of chart.lines) {
    for (const value of line.y) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  }
  if (Math.max(-low, high) >= 1e4) found.yaxis.tickformat = "~s"; // 36k
  if (low === high && low !== 0 && !view.logarithmic && !chart.band) {
    found.yaxis.range = [Math.min(0, 2 * low), Math.max(0, 2 * low)]; // a constant, however small, is no zero line
  }
  return found;
}

function plot(node, list, shape) {
  Plotly.react(node, list, shape, { displayModeBar: false, responsive: true, doubleClick: "reset" });
  if (!node.dataset.linked) {
    node.dataset.linked = "yes";
    node.on("plotly_relayout", (change) => {
      if (change["xaxis.range[0]"] !== undefined) zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
      else if (change["xaxis.autorange"]) zoom(null);
    });
    node.on("plotly_doubleclick", () => { zoom(null); return false; });
  }
}

function zoom(range) {
  if (JSON.stringify(range) === JSON.stringify(view.range)) return;
  view.range = range;
  document.getElementById("unzoom").hidden = !range;
  redraw();
}

// Draw now what is in sight; the rest when it comes into sight.
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    entry.target.dataset.seen = entry.isIntersecting ? "yes" : "";
    if (entry.isIntersecting && entry.target.dataset.stale !== "") draw(entry.target);
  }
}, { rootMargin: "300px" });

function draw(node) {
  if (!window.Plotly) return;
  node.dataset.stale = "";
  charts.get(node)();
}

function redraw() {
  for (const node of charts.keys()) {
    node.dataset.stale = "yes";
    if (node.dataset.seen) draw(node);
  }
}

function chartCard(chart) {
  const cut = chart.title.indexOf("/") + 1;
  const what = element("span", "what", element("i", "", chart.title.slice(0, cut)), chart.title.slice(cut));
  what.title = chart.title;
  const main = chart.lines[chart.lines.length - 1].y.filter((value) => value !== null);
  const last = element("span", "last", chart.lines.length === 1 ? short(main[main.length - 1]) : "");
  const node = element("div", "plot");
  charts.set(node, () => plot(node, traces(chart), shape(chart)));
  watcher.observe(node);
  return element("div", "card", element("div", "name", what, last), node);
}

function showCurves() {
  const place = document.getElementById("curves");
  const known = new Map([...place.querySelectorAll("details.panel")].map((box) => [box.dataset.title, box.open]));
  for (const node of charts.keys()) watcher.unobserve(node);
  charts.clear();
  place.replaceChildren();
  for (const panel of data.panels) {
    const count = panel.open ? "" : element("small", "", `${panel.charts.length} charts`);
    const head = element("summary", "", element("h2", "", panel.title, count));
    const [moving, still] = [panel.charts.filter((chart) => !stillAt(chart)), panel.charts.filter(stillAt)];
    const box = element("details", "panel", head, element("div", "grid", ...moving.map(chartCard)));
    if (still.length) box.append(element("p", "still", "always the same: ", ...still.map((chart) => element("span", "", `${chart.title} `, element("b", "", short(stillAt(chart).value))))));
    box.dataset.title = panel.title;
    box.open = known.get(panel.title) ?? (panel.open && (narrow ? place.childElementCount < 2 : true));
    place.append(box);
  }
  if (!data.panels.length) place.append(element("p", "none-found", "No metrics were logged yet."));
}

// The one value of a chart that never moves: a line of text says as much as its curve. Null for other charts.
function stillAt(chart) {
  const values = chart.lines.flatMap((line) => line.y.filter((value) => value !== null));
  return !chart.band && values.length >= 5 && values.every((value) => value === values[0]) ? { value: values[0] } : null;
}

// A section without content is hidden, its link too.
function present(id, content) {
  document.getElementById(id).hidden = !content;
  document.querySelector(`nav a[href="#${id}"]`).hidden = !content;
  return Boolean(content);
}

function showPhases() {
  document.getElementById("phase-bar").replaceChildren();
  if (!present("time", data.phases.length)) return;
  const sums = data.phases.map((phase) => phase.y.reduce((sum, value) => sum + (value || 0), 0));
  const all = sums.reduce((a, b) => a + b, 0) || 1;
  const bar = element("div", "bar"), list = element("ul");
  const colour = (i) => palette()[i % palette().length];
  data.phases.forEach((phase, i) => {
    const share = (100 * sums[i]) / all, ran = phase.y.filter((value) => value).length || 1;
    const piece = element("div");
    piece.style.flex = `${share} 0 0`;
    piece.title = `${phase.name}: ${share.toFixed(1)} %`;
    const key = element("i");
    for (const node of [piece, key]) { node.style.background = colour(i); node.dataset.colour = i; }
    bar.append(piece);
    list.append(element("li", "", key, phase.name, element("span", "", `${short(sums[i] / ran)} s · ${share < 1 ? share.toFixed(1) : share.toFixed(0)} %`)));
  });
  document.getElementById("phase-bar").append(bar, list);
  const node = document.getElementById("phase-chart");
  charts.set(node, () => {
    document.querySelectorAll("[data-colour]").forEach((n) => { n.style.background = colour(Number(n.dataset.colour)); });
    const ran = data.steps.map((_, k) => k).filter((k) => data.phases.some((phase) => phase.y[k] !== null));
    const list = data.phases.map((phase, i) => ({
      x: ran.map((k) => data.steps[k]), y: ran.map((k) => phase.y[k] || 0), name: plain(phase.name), stackgroup: "phases", mode: "lines",
      line: { width: 0.6, color: colour(i), shape: "hvh" }, fillcolor: colour(i) + "b0", hovertemplate: "%{y:.3~g} s",
    }));
    const shape = layout({});
    shape.yaxis = { ...shape.yaxis, type: "linear", ticksuffix: " s", rangemode: "tozero" };
    plot(node, list, shape);
  });
  watcher.observe(node);
}

// plotly.js travels compressed: unpack it, run it, then draw what is in sight.
async function loadPlotly() {
  const packed = document.getElementById("plotly");
  const bytes = Uint8Array.from(atob(packed.textContent), (c) => c.charCodeAt(0));
  packed.textContent = "";
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  redraw();
}
