"use strict";
// The page that compares runs: which there are, what they reached, where they differ. Curves and samples as for one run.

function showRuns() {
  byId("title").textContent = data.title;
  byId("footer").textContent = `Written by verl on ${data.written}. This page needs no network.`;
  byId("runs").replaceChildren(...data.runs.map((run, i) => {
    const box = element("input");
    box.type = "checkbox";
    box.checked = !view.hidden.has(i);
    box.onchange = () => {
      if (box.checked) view.hidden.delete(i); else view.hidden.add(i);
      card.classList.toggle("off", !box.checked);
      redraw();
    };
    const facts = element("div", "about", ...run.facts.map(([label, text]) => element("span", "", element("i", "", label), ` ${text}`)));
    const card = element("label", "run-card", box, element("div", "", element("b", "run", runKey(i), run.name), facts));
    card.title = run.path;
    card.classList.toggle("off", !box.checked);
    return card;
  }));
}

function headCells(first) {
  return [element("th", "", first), ...data.runs.map((run, i) => element("th", "", element("span", "run", runKey(i), run.name)))];
}

function showNumbers() {
  if (!present("numbers", data.numbers.length)) return;
  const rows = data.numbers.map((row) => {
    const best = row.better ? row.runs.reduce((a, cell) => (cell && (a === null || (cell.last - a) * row.better > 0) ? cell.last : a), null) : null;
    return element("tr", "", element("th", "", row.label), ...row.runs.map((cell) => {
      if (!cell) return element("td", "missing", "–");
      const last = element("b", cell.last === best ? "best" : "", show(cell.last, row.kind));
      const before = cell.first === null ? "" : `from ${show(cell.first, row.kind)}`;
      const peak = cell.best !== null && cell.best !== cell.last ? `, best ${show(cell.best, row.kind)} at ${cell.at}` : "";
      return element("td", "", last, element("small", "", before + peak));
    }));
  });
  byId("number-table").replaceChildren(element("thead", "", element("tr", "", ...headCells(""))), element("tbody", "", ...rows));
}

function show(value, kind) {
  if (value === null) return "–";
  return kind === "percent" ? `${(100 * value).toFixed(1)} %` : kind === "seconds" ? spent(value) : short(value);
}

function spent(seconds) {
  if (seconds < 90) return `${short(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${(minutes / 60).toFixed(1)} h`;
}

function showDifferences() {
  present("differences", true);
  const search = byId("difference-search"), everything = byId("difference-all");
  const draw = () => {
    const query = search.value.toLowerCase();
    const rows = [];
    for (const [key, values] of Object.entries(data.config)) {
      const differs = new Set(values).size > 1;
      if (!(differs || everything.checked) || !`${key} ${values.join(" ")}`.toLowerCase().includes(query)) continue;
      const name = element("th", "mono");
      highlight(name, key, query);
      rows.push(element("tr", differs ? "differs" : "", name, ...values.map((value) => {
        const cell = element("td", value === null ? "mono missing" : "mono");
        highlight(cell, value === null ? "not there" : value, query);
        return cell;
      })));
    }
    byId("difference-table").replaceChildren(element("thead", "", element("tr", "", ...headCells("key"))), element("tbody", "", ...rows));
    byId("difference-none").hidden = rows.length > 0;
  };
  search.oninput = everything.onchange = draw;
  draw();
}

const most = Math.max(...data.runs.map((run) => run.steps.length));
if (most > 40) view.smoothing = most > 200 ? 0.85 : 0.7; // noisy curves over each other cannot be read
byId("axis").addEventListener("change", (event) => { view.axis = event.target.value; view.range = null; byId("unzoom").hidden = true; redraw(); });
setUp(() => {
  showRuns();
  showNumbers();
  byId("run").hidden = false;
  choices("run", "all runs", data.runs.map((run, i) => [i, run.name]));
  showCurves();
  showSamples();
  showDifferences();
});
