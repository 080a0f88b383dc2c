"use strict";
// Header, samples table, config and notices. Texts of the run only ever become text nodes, never markup.

const PAGE_SIZE = 25;
const byId = (id) => document.getElementById(id);

function showHeader() {
  for (const id of ["facts", "tiles"]) byId(id).replaceChildren();
  byId("title").textContent = data.title;
  for (const [label, text] of data.facts) {
    byId("facts").append(element("div", "", element("dt", "", label), element("dd", "", text)));
  }
  for (const tile of data.tiles) byId("tiles").append(tileCard(tile));
  byId("footer").textContent = `Written by verl on ${data.written}. This page needs no network.`;
}

function tileCard(tile) {
  const percent = tile.kind === "percent";
  const number = (value) => (value === null ? "–" : percent ? (100 * value).toFixed(1) : short(value));
  const value = element("div", "value", number(tile.after));
  if (percent && tile.after !== null) value.append(element("span", "", "%"));
  const label = element("div", "label", tile.label);
  label.title = tile.label;
  const card = element("div", "tile", label, value);
  if (tile.before !== null && tile.after !== null) {
    const change = tile.after - tile.before;
    const sign = change > 0 ? "+" : change < 0 ? "−" : "±";
    const size = percent ? `${(100 * Math.abs(change)).toFixed(1)} points` : short(Math.abs(change));
    const good = tile.better && change ? (change * tile.better > 0 ? "up" : "down") : "";
    card.append(element("div", "change", `from ${number(tile.before)}${percent ? " %" : ""} · `, element("span", good, sign + size)));
  }
  return card;
}

// -- samples ----------------------------------------------------------------------------------------------------------
let page = 0, matches = [];
const asText = (value) => (value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value));
let searchable = [];

function limits(name) {
  const read = (id, otherwise) => (byId(id).value === "" ? otherwise : Number(byId(id).value));
  return [read(`${name}-from`, -Infinity), read(`${name}-to`, Infinity)];
}

function filterSamples() {
  const query = byId("query").value.toLowerCase(), split = byId("split").value, run = byId("run")?.value;
  const [firstStep, lastStep] = limits("step"), [least, greatest] = limits("score");
  const anyScore = least === -Infinity && greatest === Infinity; // a failed reward has no score to compare
  matches = [];
  data.samples.forEach((row, i) => {
    if (split && row.split !== split) return;
    if (run && row.run !== Number(run)) return;
    if (row.step < firstStep || row.step > lastStep) return;
    if (!anyScore && !(typeof row.score === "number" && row.score >= least && row.score <= greatest)) return;
    if (query && !searchable[i].includes(query)) return;
    matches.push(i);
  });
  sortMatches(byId("order").value);
  page = 0;
  showPage();
}

function sortMatches(order) {
  const step = (i) => data.samples[i].step;
  const score = (i, missing) => (typeof data.samples[i].score === "number" ? data.samples[i].score : missing);
  const compare = {
    newest: (a, b) => step(b) - step(a) || a - b,
    oldest: (a, b) => step(a) - step(b) || a - b,
    best: (a, b) => score(b, -1e300) - score(a, -1e300) || step(b) - step(a) || a - b,
    prompt: (a, b) => (asText(data.samples[a].prompt) < asText(data.samples[b].prompt) ? -1 : asText(data.samples[a].prompt) > asText(data.samples[b].prompt) ? 1 : a - b),
    worst: (a, b) => score(a, 1e300) - score(b, 1e300) || step(b) - step(a) || a - b,
  };
  matches.sort(compare[order]);
}

function showPage() {
  const query = byId("query").value.toLowerCase();
  const last = Math.max(0, Math.ceil(matches.length / PAGE_SIZE) - 1);
  const rows = matches.slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE).map((i) => sampleRow(data.samples[i], query));
  const head = element("div", "row head", ...["step", "prompt", "response", "expected"].map((name) => element("div", "", name)));
  const scoreHead = element("div", "", "score");
  scoreHead.style.textAlign = "right";
  head.append(scoreHead);
  byId("rows").replaceChildren(...(rows.length ? [head, ...rows] : [element("div", "none-found", "No sample fits these filters.")]));
  const left = data.total_samples > data.samples.length ? `, every ${Math.ceil(data.total_samples / data.samples.length)}th of ${data.total_samples.toLocaleString("en")} in samples.jsonl` : "";
  byId("sample-count").textContent = `${matches.length.toLocaleString("en")} of ${data.samples.length.toLocaleString("en")}${left}`;
  const turn = (text, to) => {
    const button = element("button", "", text);
    button.type = "button";
    button.disabled = to < 0 || to > last;
    button.onclick = () => { page = to; showPage(); byId("samples").scrollIntoView(); };
    return button;
  };
  const pages = [turn("← back", page - 1), element("span", "", `page ${page + 1} of ${last + 1}`), turn("next →", page + 1)];
  byId("pages").replaceChildren(...(last > 0 ? pages : []));
}

function sampleRow(row, query) {
  const where = element("div", "where", element("b", "", String(row.step)), [row.split, row.finish_reason].filter(Boolean).join(" · "));
  if (data.runs) where.append(element("span", "run", runKey(row.run), data.runs[row.run].name));
  const cells = [["prompt", "prompt"], ["response", "response"], ["expected", "ground_truth"]].map(([label, key]) => {
    const text = asText(row[key]);
    const cell = element("div", text ? "text" : "text empty");
    cell.dataset.label = label;
    highlight(cell, text, query);
    return cell;
  });
  const known = typeof row.score === "number";
  const score = element("div", known ? (row.score > 0 ? "score good" : "score") : "score none", known ? short(row.score) : row.split === "preview" ? "" : row.score || "failed");
  const line = element("div", "row", where, ...cells, score);
  line.title = row.uid ? `uid ${row.uid}; click to open or close` : "click to open or close";
  line.onclick = () => { if (!String(getSelection())) line.classList.toggle("open"); };
  return line;
}

function highlight(node, text, query) {
  let start = 0;
  if (query) {
    const lower = text.toLowerCase();
    for (let at = lower.indexOf(query); at >= 0 && lower.length === text.length; at = lower.indexOf(query, start)) {
      node.append(text.slice(start, at), element("mark", "", text.slice(at, at + query.length)));
      start = at + query.length;
    }
  }
  node.append(text.slice(start));
}

function showSamples() {
  if (!present("samples", data.samples.length)) return;
  searchable = data.samples.map((row) => [row.prompt, row.response, row.ground_truth].map(asText).join("\n").toLowerCase());
  const splits = [...new Set(data.samples.map((row) => row.split))];
  choices("split", "all splits", splits.map((split) => [split, split]));
  byId("split").hidden = splits.length < 2;
  const shown = page;
  filterSamples();
  page = Math.min(shown, Math.max(0, Math.ceil(matches.length / PAGE_SIZE) - 1));
  if (page) showPage();
}

// Fill a select box, keeping what is chosen.
function choices(id, all, options) {
  const before = byId(id).value;
  byId(id).replaceChildren(new Option(all, ""), ...options.map(([value, text]) => new Option(text, value)));
  if (options.some(([value]) => String(value) === before)) byId(id).value = before;
}

// The coloured dot of a run.
function runKey(run) {
  const key = element("i");
  key.style.background = palette()[run % palette().length];
  key.dataset.colour = run;
  return key;
}

// -- config, machine, notices -------------------------------------------------------------------------------------------
function showTable(section, values) {
  const entries = Object.entries(values), search = section.querySelector(".table-search"), table = section.querySelector(".table");
  if (!present(section.id, entries.length)) return;
  section.querySelector("h2 small")?.remove();
  section.querySelector("h2").append(element("small", "", `${entries.length} entries`));
  const show = () => {
    const query = search.value.toLowerCase();
    const found = entries.filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(query));
    table.replaceChildren(...found.map(([key, value]) => {
      const cells = [element("div", "key mono"), element("div", "value mono")];
      highlight(cells[0], key, query);
      highlight(cells[1], value, query);
      return element("div", "", ...cells);
    }));
    if (!found.length) table.append(element("p", "none-found", "Nothing fits."));
  };
  search.oninput = show;
  show();
}

function showNotices() {
  if (!present("notices", data.notices.length)) return;
  byId("notice-list").replaceChildren(...data.notices.map((notice) => element("li", "", element("time", "", notice.time), element("span", "", notice.text))));
}

// -- the controls, and following a run that is not finished ---------------------------------------------------------------
function setUp(show) {
  show();
  for (const control of byId("filters").elements) control.addEventListener("input", filterSamples);
  byId("smoothing").value = String(view.smoothing);
  byId("smoothing").addEventListener("input", (event) => { view.smoothing = Number(event.target.value); redraw(); });
  byId("logarithmic").addEventListener("change", (event) => { view.logarithmic = event.target.checked; redraw(); });
  byId("unzoom").addEventListener("click", () => zoom(null));
  dark.addEventListener("change", () => { recolour(); redraw(); });
  loadPlotly().catch((error) => {
    byId("curves").prepend(element("p", "none-found", `The curves cannot be drawn in this browser (${error}); a newer one can.`));
  });
  if (data.live) setInterval(() => follow(show), 1000 * data.live.seconds);
}

function recolour() {
  document.querySelectorAll("[data-colour]").forEach((node) => { node.style.background = palette()[Number(node.dataset.colour) % palette().length]; });
}

async function follow(show) {
  try {
    const reply = await fetch(`${data.live.url}&known=${encodeURIComponent(data.live.stamp)}`);
    if (reply.status === 204) return;
    if (!reply.ok) throw new Error(`the server says ${reply.status}`);
    data = await reply.json();
    show();
    redraw();
    byId("lost")?.remove();
  } catch (error) {
    if (!byId("lost")) {
      const box = element("p", "none-found", `No news any more (${error.message}): verl dash has ended, or the run's folder has gone.`);
      box.id = "lost";
      document.querySelector("main").prepend(box);
    }
  }
}
