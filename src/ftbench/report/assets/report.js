"use strict";
// Everything below works on the JSON block of this page alone. Text of runs is set as text, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const make = (name, text, attributes = {}) => {
    const found = document.createElement(name);
    if (text !== undefined && text !== null) found.textContent = text;
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    return found;
  };
  // plotly reads a little HTML in its labels; marks that turn the direction of writing stay out of a drawing
  const label = (text) => String(text).replace(/[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "")
    .replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // --- light and dark -------------------------------------------------------------------------------------------------
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const printing = matchMedia("print");
  const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    redraw();
  });
  dark.addEventListener("change", () => redraw());

  // --- the table ------------------------------------------------------------------------------------------------------
  const body = document.querySelector("#runs tbody");
  const rows = [...body.rows];
  const texts = rows.map((row) => {
    const run = data.runs[Number(row.dataset.i)];
    return [row.textContent, run.label, run.workload, run.gpu, run.reason].join(" ").toLowerCase();
  });
  const collator = new Intl.Collator(["ja", "en"], { numeric: true });

  function filter() {
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const state = $("state").value;
    let shown = 0;
    rows.forEach((row, i) => {
      const fits = (!state || row.dataset.s === state) && words.every((word) => texts[i].includes(word));
      row.hidden = !fits;
      shown += fits;
    });
    $("count").textContent = shown === rows.length ? `${rows.length} runs` : `${shown} of ${rows.length} runs`;
  }
  $("filter").addEventListener("input", filter);
  $("state").addEventListener("change", filter);

  const heads = [...document.querySelectorAll("#runs thead th")];
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (button) button.addEventListener("click", () => sort(head, column));
  });

  function sort(head, column) {
    const rising = head.getAttribute("aria-sort") !== "ascending";
    const value = (row) => {
      const cell = row.cells[column];
      return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
    };
    const known = rows.map((row) => [row, value(row)]);
    known.sort(([a, x], [b, y]) => {
      const emptyX = x === "", emptyY = y === ""; // what is not known comes last, whichever way
      if (emptyX || emptyY) return emptyX - emptyY || a.dataset.i - b.dataset.i;
      const order = typeof x === "number" && typeof y === "number" ? x - y : collator.compare(x, y);
      return (rising ? order : -order) || a.dataset.i - b.dataset.i;
    });
    body.append(...known.map(([row]) => row));
    heads.forEach((other) => other.hasAttribute("aria-sort") && other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
  }

  // --- one run --------------------------------------------------------------------------------------------------------
  const dialog = $("details");
  body.addEventListener("click", (event) => {
    const button = event.target.closest(".open");
    if (button) open(data.runs[Number(button.closest("tr").dataset.i)]);
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());

  function open(run) {
    const close = make("button", "Close", { type: "button", class: "close" });
    close.addEventListener("click", () => dialog.close());
    const parts = [close, make("h2", run.id, { id: "details-title" }), make("p", [`${run.method}, batch ${run.batch}`, run.workload, run.gpu].filter(Boolean).join(" · "))];
    const state = make("p", null);
    state.append(make("span", run.state, { class: "badge " + (run.state === "ok" ? "good" : "bad") }));
    if (run.reason) state.append(" " + run.reason);
    parts.push(state);
    if (run.warnings.length) {
      const list = make("ul");
      run.warnings.forEach((text) => list.append(make("li", text)));
      parts.push(make("h3", "Warnings"), list);
    }
    const figures = data.labels.map((name, i) => [name, run.figures[i]]).filter((pair) => pair[1]);
    const [asked, applied, machine] = run.facts.map((i) => data.facts[i]);
    for (const [name, pairs] of [["Figures", figures], ["Asked for", asked],
      ["Applied, read back from the live objects", applied], ["Machine", machine]]) {
      if (!pairs.length) continue;
      const list = make("dl", null, { class: name === "Figures" ? "two" : "one" });
      pairs.forEach(([key, value]) => list.append(make("dt", key), make("dd", value)));
      parts.push(make("h3", name), list);
    }
    dialog.replaceChildren(...parts);
    dialog.showModal();
    dialog.scrollTop = 0;
  }

  // --- figures --------------------------------------------------------------------------------------------------------
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (i) => style(`--c${i % 8}`);
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
  const round = (value) => Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  const METRICS = {
    samples: "samples per hour", step: "median step, s", tokens: "real tokens per second",
    peak: "GiB of tensors at the peak", energy: "J per 1,000 samples, GPU only",
  };
  const many = (key) => new Set(data.runs.map((run) => run[key])).size > 1;
  const order = (key) => [...new Set(data.runs.map((run) => run[key]))];
  const gpus = order("gpu"), methods = order("method");
  const workload = () => ($("workload") ? $("workload").value : data.runs[0].workload);

  function layout(more) {
    const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--quiet"), automargin: true };
    const font = { color: style("--text"), family: getComputedStyle(document.body).fontFamily, size: 13 };
    const { xaxis = {}, yaxis = {}, ...rest } = more;
    return {
      paper_bgcolor: style("--bg"), plot_bgcolor: style("--bg"), font, hovermode: "closest",
      margin: { l: 8, r: 14, t: 14, b: 8 }, xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis },
      ...(printing.matches ? { width: 660 } : {}),
      legend: { orientation: "h", yref: "container", y: 0.01, yanchor: "bottom", x: 0, xanchor: "left", font: { size: 12 } },
      hoverlabel: { bgcolor: style("--panel"), bordercolor: style("--line"), font, align: "left", namelength: -1 }, ...rest,
    };
  }
  const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
    toImageButtonOptions: { format: "svg", filename: "ftbench" }, showTips: false, displayModeBar: "hover" };
  const legend = (count) => (count > 1 && count <= 24 ? { showlegend: true } : { showlegend: false });

  function pareto(box) {
    const runs = data.runs.filter((run) => run.workload === workload() && run.values.samples && run.values.peak);
    const groups = new Map();
    runs.forEach((run) => {
      const name = many("gpu") ? `${run.method}, ${run.gpu}` : run.method;
      groups.set(name, [...(groups.get(name) || []), run]);
    });
    const traces = [];
    const best = [...runs].sort((a, b) => a.values.peak - b.values.peak || b.values.samples - a.values.samples);
    let top = -Infinity;
    const front = best.filter((run) => run.values.samples > top && ((top = run.values.samples), true));
    traces.push({ x: front.map((run) => run.values.peak), y: front.map((run) => run.values.samples), mode: "lines",
      name: "not beaten in both", line: { color: style("--quiet"), dash: "dot", width: 1.5 }, hoverinfo: "skip" });
    for (const [name, found] of groups) {
      const run = found[0];
      traces.push({
        x: found.map((one) => one.values.peak), y: found.map((one) => one.values.samples), name: label(name), type: "scatter",
        mode: found.length <= 12 && runs.length <= 40 ? "markers+text" : "markers",
        text: found.map((one) => `${one.batch}`), textposition: "top center", textfont: { size: 11, color: style("--quiet") },
        hovertext: found.map((one) => `<b>${label(one.label)}</b><br>${round(one.values.samples)} samples/h<br>` +
          `${round(one.values.peak)} GiB of tensors at the peak` + (one.warnings.length ? "<br>carries a warning" : "")),
        hoverinfo: "text",
        marker: { size: 10, color: colour(methods.indexOf(run.method)), symbol: SYMBOLS[gpus.indexOf(run.gpu) % 8],
          line: { width: 1, color: style("--bg") } },
      });
    }
    Plotly.react(box, traces, layout({
      height: 420, ...legend(traces.length), xaxis: { title: { text: box.clientWidth < 520 ? "peak GiB (number: batch)" : "GiB of tensors at the peak (number: batch)" }, rangemode: "tozero" },
      yaxis: { title: { text: "samples per hour" }, rangemode: "tozero" },
    }), CONFIG);
  }

  const MOST_BARS = 60;
  function bars(box) {
    const metric = $("metric").value;
    const all = data.cells.filter((cell) => cell.workload === workload() && cell.figures[metric]);
    const cells = all.slice(0, MOST_BARS);
    const groups = many("gpu") ? gpus : methods;
    const key = many("gpu") ? "gpu" : "method";
    const names = [...new Set(cells.map((cell) => label(cell.label)))];
    const traces = groups.map((group, i) => {
      const found = cells.filter((cell) => cell[key] === group);
      const value = (cell, place) => cell.figures[metric][place];
      return {
        type: "bar", orientation: "h", name: label(group || "CPU"), y: found.map((cell) => label(cell.label)),
        x: found.map((cell) => value(cell, 0)), marker: { color: colour(i) }, textposition: "none",
        error_x: { type: "data", symmetric: false, color: style("--text"), thickness: 1.5, width: 4,
          array: found.map((cell) => (value(cell, 2) === null ? null : value(cell, 2) - value(cell, 0))),
          arrayminus: found.map((cell) => (value(cell, 1) === null ? null : value(cell, 0) - value(cell, 1))) },
        hovertext: found.map((cell) => `<b>${label(cell.label)}</b><br>${label(cell.gpu)}<br>${round(value(cell, 0))} ${METRICS[metric]}` +
          (value(cell, 1) === null ? "<br>no interval" : `<br>95 %: ${round(value(cell, 1))} to ${round(value(cell, 2))}`) +
          `<br>${cell.runs} run${cell.runs > 1 ? "s" : ""}`),
        hoverinfo: "text",
      };
    }).filter((trace) => trace.x.length);
    const left = all.length - cells.length;
    Plotly.react(box, traces, layout({
      barmode: "group", bargap: 0.25, height: 130 + cells.length * (cells.length > 25 ? 17 : 24), ...legend(traces.length),
      xaxis: { title: { text: METRICS[metric] + (left > 0 ? ` (first ${MOST_BARS} of ${all.length} cells)` : "") }, rangemode: "tozero" },
      yaxis: { categoryorder: "array", categoryarray: names.reverse(), type: "category", tickfont: { size: 12 } },
    }), CONFIG);
  }

  // Curves are kept as little-endian arrays in base64 and unpacked when they are first drawn.
  const unpack = (text, size, read) => {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Array.from({ length: bytes.length / size }, (_, i) => view[read](i * size, true));
  };
  const unpacked = new Map();
  function series(index, name) {
    const key = `${index} ${name}`;
    if (!unpacked.has(key)) {
      const curve = data.curves[index];
      const packed = curve && curve[name];
      unpacked.set(key, packed && {
        steps: unpack(packed[0], curve.wide ? 4 : 2, curve.wide ? "getUint32" : "getUint16"),
        values: unpack(packed[1], 4, "getFloat32").map((value) => (Number.isFinite(value) ? value : null)),
      });
    }
    return unpacked.get(key);
  }
  const CURVES = {
    memory: [["allocated", "reserved", "peak"], "GiB"], step: [["step"], "step time, s"], loss: [["loss"], "training loss, nats per token"],
    elapsed: [["elapsed"], "elapsed time, s"],
  };
  const picked = new Set();

  function curves(box) {
    const [names, title] = CURVES[$("curve").value];
    const progress = $("along").value === "progress";
    const traces = [];
    [...picked].forEach((index, place) => {
      const run = data.runs[index];
      names.forEach((name, line) => {
        const found = series(index, name);
        if (!found) return;
        const planned = data.curves[index].planned;
        const x = progress ? found.steps.map((step) => (planned ? (step / planned) * 100 : null)) : found.steps;
        const what = names.length > 1 ? `${run.label}: ${name}` : run.label;
        traces.push({
          x, y: found.values, name: label(what), mode: found.steps.length < 30 ? "lines+markers" : "lines", marker: { size: 4 },
          line: { color: colour(place), width: 2, dash: names.length > 1 ? ["solid", "dash", "dot"][line] : DASHES[Math.floor(place / 8) % 5] },
          hovertext: found.values.map((value, i) => `<b>${label(what)}</b><br>${value === null ? "not a number" : value.toPrecision(5)} ` +
            `${title.split(", ").pop()}<br>step ${found.steps[i]}${planned ? " of " + planned : ""}`),
          hoverinfo: "text", connectgaps: false,
        });
      });
    });
    const narrow = box.clientWidth < 520;
    Plotly.react(box, traces, layout({
      height: 400 + (narrow ? Math.min(traces.length, 24) * 20 : Math.ceil(Math.min(traces.length, 24) / 3) * 20),
      showlegend: traces.length > 0 && traces.length <= 24,
      xaxis: { title: { text: progress ? "progress, % of the planned steps" : "optimizer step" }, rangemode: "tozero" },
      yaxis: { title: { text: title }, rangemode: $("curve").value === "loss" ? "normal" : "tozero" },
      annotations: traces.length ? [] : [{ text: "No run is chosen", showarrow: false, x: 0.5, y: 0.5, xref: "paper", yref: "paper" }],
    }), CONFIG);
  }

  function chooser() {
    const drawn = Object.keys(data.curves).map(Number);
    // To begin with: of each method on each GPU the run that ended well with the most steps, of those alike the fastest.
    const longest = new Map();
    drawn.forEach((index) => {
      const run = data.runs[index], key = `${run.method} ${run.gpu}`, before = longest.get(key);
      if (run.state !== "ok") return;
      const more = before === undefined ? 1 : data.curves[index].steps - data.curves[before].steps;
      if (more > 0 || (more === 0 && (run.values.samples || 0) > (data.runs[before].values.samples || 0))) longest.set(key, index);
    });
    (longest.size ? [...longest.values()] : drawn).slice(0, 4).forEach((index) => picked.add(index));
    const MOST = 200;
    const list = () => {
      const words = $("pick-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
      const found = drawn.filter((index) => {
        const run = data.runs[index], text = `${run.label} ${run.id} ${run.gpu} ${run.state}`.toLowerCase();
        return words.every((word) => text.includes(word));
      });
      const items = found.slice(0, MOST).map((index) => {
        const item = make("label"), box = make("input", null, { type: "checkbox" });
        box.checked = picked.has(index);
        box.addEventListener("change", () => { box.checked ? picked.add(index) : picked.delete(index); tell(); draw("curves-figure"); });
        item.append(box, make("span", data.runs[index].label + (data.runs[index].state === "ok" ? "" : ` (${data.runs[index].state})`)));
        return item;
      });
      if (found.length > MOST) items.push(make("span", `${found.length - MOST} more: filter to see them`, { class: "quiet" }));
      $("pick").replaceChildren(...items);
    };
    const tell = () => { $("picked").textContent = `(${picked.size} of ${drawn.length})`; };
    $("pick-filter").addEventListener("input", list);
    list();
    tell();
  }

  // --- drawn on demand ------------------------------------------------------------------------------------------------
  const FIGURES = { "pareto-figure": pareto, "bars-figure": bars, "curves-figure": curves };
  const done = new Set();
  function draw(id) {
    const box = $(id);
    if (!box || !done.has(id)) return;
    FIGURES[id](box);
  }
  function redraw() { done.forEach(draw); }
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting || done.has(entry.target.id)) return;
    done.add(entry.target.id);
    draw(entry.target.id);
  }), { rootMargin: "400px" });
  Object.keys(FIGURES).forEach((id) => $(id) && seen.observe($(id)));
  if ($("pick")) chooser();
  for (const [id, figures] of Object.entries({ workload: ["pareto-figure", "bars-figure"], metric: ["bars-figure"],
    curve: ["curves-figure"], along: ["curves-figure"] })) {
    if ($(id)) $(id).addEventListener("change", () => figures.forEach(draw));
  }
  // On paper every figure is drawn, in the light colours that the style sheet sets there.
  const paper = () => { Object.keys(FIGURES).forEach((id) => $(id) && done.add(id)); redraw(); };
  addEventListener("beforeprint", paper);
  addEventListener("afterprint", redraw);
  printing.addEventListener("change", () => (printing.matches ? paper() : redraw()));
  document.documentElement.dataset.ready = "yes";
})();
