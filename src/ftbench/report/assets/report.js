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

  // --- light and dark -------------------------------------------------------------------------------------------------
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  });

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

  // --- drawing --------------------------------------------------------------------------------------------------------
  const NS = Object.assign(document.createElement("div"), { innerHTML: "<svg/>" }).firstChild.namespaceURI;
  function shape(parent, name, attributes, text) {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }
  const colour = (i) => `var(--c${i % 8})`; // of the style sheet, so that light and dark need no other drawing
  const SYMBOLS = ["M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0", "M-4.5,-4.5h9v9h-9z", "M0,-6.5L6.5,0L0,6.5L-6.5,0z", "M0,-6L6,5H-6z",
    "M0,6L6,-5H-6z", "M-2,-6h4v4h4v4h-4v4h-4v-4h-4v-4h4z"];
  const DASHES = ["", "7 4", "2 3", "7 3 2 3", "12 5"];
  const round = (value) => Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));

  // A scale from values to pixels, with round ticks; `zero` says that it starts at nothing.
  function scaled(values, start, end, zero, most) {
    const known = values.filter(Number.isFinite);
    let low = known.reduce((a, b) => Math.min(a, b), zero ? 0 : Infinity), high = known.reduce((a, b) => Math.max(a, b), zero ? 0 : -Infinity);
    if (!(high > low)) [low, high] = Number.isFinite(low) ? [low - (zero ? 0 : 1), low + 1] : [0, 1];
    if (!zero) [low, high] = [low - (high - low) * 0.04, high + (high - low) * 0.04];
    else high += (high - low) * 0.04;
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((each) => each * power >= rough * 0.999) * power;
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const to = (value) => start + (value - low) / (high - low) * (end - start);
    const ticks = [];
    for (let i = Math.ceil(low / step); i * step <= high; i++) {
      const text = (i * step).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
      ticks.push([to(i * step), text]);
    }
    return { to, ticks, from: (pixel) => low + (pixel - start) / (end - start) * (high - low) };
  }

  // An empty drawing with a legend of [name, colour, symbol or dash] below; a few names at most.
  function canvas(box, height, names) {
    const svg = document.createElementNS(NS, "svg"), width = box.clientWidth;
    for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width: "100%" })) svg.setAttribute(key, value);
    const legend = make("div", null, { class: "legend" });
    for (const [name, fill, symbol, dash] of names.length <= 24 ? names : []) {
      const item = make("span"), key = document.createElementNS(NS, "svg");
      key.setAttribute("viewBox", "-12 -7 24 14");
      if (dash !== undefined) shape(key, "path", { d: "M-12,0H12", class: "line", style: `stroke: ${fill}`, "stroke-dasharray": dash });
      else shape(key, "path", { d: SYMBOLS[symbol % SYMBOLS.length], style: `fill: ${fill}` });
      item.append(key, name);
      legend.append(item);
    }
    box.replaceChildren(svg, legend);
    return svg;
  }

  function axis(svg, scale, at, end, title, upright) {
    for (const [pixel, text] of scale.ticks) {
      shape(svg, "path", { d: upright ? `M${at},${pixel}H${end}` : `M${pixel},${at}V${end}`, class: "gridline" });
      shape(svg, "text", upright ? { x: at - 6, y: pixel + 4, "text-anchor": "end", class: "tick" }
        : { x: pixel, y: at + 17, "text-anchor": "middle", class: "tick" }, text);
    }
    shape(svg, "text", upright ? { x: 4, y: 15 } : { x: (svg.viewBox.baseVal.width + scale.ticks[0][0]) / 2, y: at + 36, "text-anchor": "middle" }, title);
  }

  // The text of the mark nearest to the mouse: marks are [x, y, text], or [null, y, text] for one that spans the drawing.
  function hover(box, svg, marks) {
    const tip = make("div", null, { class: "tip", role: "tooltip", hidden: "" });
    box.append(tip);
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
    svg.addEventListener("pointermove", (event) => {
      const edge = svg.getBoundingClientRect(), x = event.clientX - edge.left, y = event.clientY - edge.top;
      let best = null, least = 40;
      for (const mark of marks) {
        const far = Math.hypot(mark[0] === null ? 0 : mark[0] - x, mark[1] - y);
        if (far < least) [best, least] = [mark, far];
      }
      tip.hidden = !best;
      if (!best) return;
      tip.textContent = best[2];
      tip.style.left = `${Math.max(0, Math.min(x + 12, edge.width - tip.offsetWidth))}px`;
      tip.style.top = `${best[1] + 16}px`;
    });
  }

  // Draws series {name, colour, symbol, dash, points: [{x, y, text, number}]}: marks where there is a symbol, a line where
  // there is a dash, broken where a value is not known.
  function plot(box, height, xTitle, yTitle, xZero, yZero, series) {
    const every = series.flatMap((line) => line.points);
    const svg = canvas(box, height, series.map((line) => [line.name, line.colour, line.symbol, line.dash]));
    const bottom = height - 46, width = box.clientWidth, marks = [], taken = [];
    const ys = scaled(every.map((point) => point.y), bottom, 28, yZero, 6);
    const left = 14 + 7.5 * Math.max(...ys.ticks.map(([, text]) => text.length));
    const xs = scaled(every.map((point) => point.x), left, width - 16, xZero, width < 520 ? 4 : 8);
    axis(svg, ys, left, width - 8, yTitle, true);
    axis(svg, xs, bottom, 28, xTitle, false);
    for (const line of series) {
      const group = shape(svg, "g", { class: "series" });
      const places = line.points.map((point) => Number.isFinite(point.y) ? [xs.to(point.x), ys.to(point.y)] : null);
      if (line.dash !== undefined) {
        const path = places.map((at, i) => at ? `${i && places[i - 1] ? "L" : "M"}${at[0].toFixed(1)},${at[1].toFixed(1)}` : "").join("");
        shape(group, "path", { d: path, class: "line", style: `stroke: ${line.colour}`, "stroke-dasharray": line.dash });
      }
      line.points.forEach((point, i) => {
        const at = places[i];
        if (!at) return;
        if (line.symbol !== undefined || line.points.length < 30 && point.text) {
          shape(group, "path", { d: SYMBOLS[(line.symbol || 0) % SYMBOLS.length], class: "point", style: `fill: ${line.colour}`,
            transform: `translate(${at[0].toFixed(1)},${at[1].toFixed(1)})${line.symbol === undefined ? "scale(.5)" : ""}` });
        }
        if (point.text) marks.push([...at, point.text]);
        if (point.number && !taken.some(([x, y]) => Math.abs(x - at[0]) < 22 && Math.abs(y - at[1]) < 13)) {
          taken.push(at);
          shape(group, "text", { x: at[0], y: at[1] - 9, "text-anchor": "middle", class: "tick" }, point.number);
        }
      });
    }
    hover(box, svg, marks);
    return { svg, from: xs.from };
  }

  // --- figures --------------------------------------------------------------------------------------------------------
  const METRICS = {
    samples: "samples per hour", step: "median step, s", tokens: "real tokens per second",
    peak: "GiB of tensors at the peak", energy: "J per 1,000 samples, GPU only",
  };
  const many = (key) => new Set(data.runs.map((run) => run[key])).size > 1;
  const order = (key) => [...new Set(data.runs.map((run) => run[key]))];
  const gpus = order("gpu"), methods = order("method");
  const workload = () => ($("workload") ? $("workload").value : data.runs[0].workload);

  function pareto(box) {
    const runs = data.runs.filter((run) => run.workload === workload() && run.values.samples && run.values.peak);
    const groups = new Map();
    runs.forEach((run) => {
      const name = many("gpu") ? `${run.method}, ${run.gpu}` : run.method;
      groups.set(name, [...(groups.get(name) || []), run]);
    });
    const best = [...runs].sort((a, b) => a.values.peak - b.values.peak || b.values.samples - a.values.samples);
    let top = -Infinity;
    const front = best.filter((run) => run.values.samples > top && ((top = run.values.samples), true));
    const at = (run) => ({ x: run.values.peak, y: run.values.samples });
    const series = [{ name: "not beaten in both", colour: "var(--quiet)", dash: "2 4", points: front.map(at) }];
    for (const [name, found] of groups) {
      series.push({
        name, colour: colour(methods.indexOf(found[0].method)), symbol: gpus.indexOf(found[0].gpu),
        points: found.map((run) => ({ ...at(run), number: runs.length <= 40 ? `${run.batch}` : "",
          text: `${run.label}\n${round(run.values.samples)} samples/h\n${round(run.values.peak)} GiB of tensors at the peak` +
            (run.warnings.length ? "\ncarries a warning" : "") })),
      });
    }
    plot(box, 400, "GiB of tensors at the peak (number: batch)", "samples per hour", true, true, series);
  }

  const MOST_BARS = 60, ROW = 36;
  function bars(box) {
    const metric = $("metric").value;
    const all = data.cells.filter((cell) => cell.workload === workload() && cell.figures[metric]);
    const cells = all.slice(0, MOST_BARS);
    const [groups, key] = many("gpu") ? [gpus, "gpu"] : [methods, "method"];
    const used = groups.filter((group) => cells.some((cell) => cell[key] === group));
    const bottom = cells.length * ROW + 6, width = box.clientWidth, marks = [];
    const svg = canvas(box, bottom + 46, used.length > 1 ? used.map((group) => [group || "CPU", colour(groups.indexOf(group)), 1]) : []);
    const scale = scaled(cells.flatMap((cell) => cell.figures[metric]).map((value) => value ?? NaN), 8, width - 16, true, width < 520 ? 4 : 8);
    const left = all.length - cells.length;
    axis(svg, scale, bottom, 4, METRICS[metric] + (left > 0 ? ` (first ${MOST_BARS} of ${all.length} cells)` : ""), false);
    cells.forEach((cell, i) => {
      const [value, low, high] = cell.figures[metric], top = i * ROW + 4, middle = top + 23;
      const group = shape(svg, "g", { class: "bar" });
      shape(group, "rect", { x: scale.to(0), y: top + 16, width: Math.max(1, scale.to(value) - scale.to(0)), height: 14, style: `fill: ${colour(groups.indexOf(cell[key]))}` });
      if (low !== null) shape(group, "path", { d: `M${scale.to(low)},${middle - 4}v8M${scale.to(low)},${middle}H${scale.to(high)}m0,-4v8`, class: "whisker" });
      const figure = shape(group, "text", { x: width - 8, y: top + 12, "text-anchor": "end", class: "tick" }, round(value));
      const name = shape(group, "text", { x: 8, y: top + 12 }, cell.label);
      const room = width - 32 - figure.getComputedTextLength();
      for (let length = cell.label.length; length > 8 && name.getComputedTextLength() > room; length--) name.textContent = `${cell.label.slice(0, length)}…`;
      marks.push([null, middle, `${cell.label}\n${cell.gpu}\n${round(value)} ${METRICS[metric]}\n` +
        (low === null ? "no interval" : `95 %: ${round(low)} to ${round(high)}`) + `\n${cell.runs} run${cell.runs > 1 ? "s" : ""}`]);
    });
    hover(box, svg, marks);
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
        steps: unpack(curve.at[packed[0]], curve.wide ? 4 : 2, curve.wide ? "getUint32" : "getUint16"),
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
  let zoomed = null;

  function curves(box) {
    const [names, title] = CURVES[$("curve").value];
    const progress = $("along").value === "progress";
    const lines = [...picked].flatMap((index, place) => names.map((name, line) => {
      const run = data.runs[index], found = series(index, name);
      if (!found) return null;
      const planned = data.curves[index].planned, what = names.length > 1 ? `${run.label}: ${name}` : run.label;
      const points = found.steps.map((step, i) => ({
        x: progress ? (planned ? (step / planned) * 100 : NaN) : step, y: found.values[i] ?? NaN,
        text: `${what}\n${(found.values[i] ?? NaN).toPrecision(5)} ${title.split(", ").pop()}\nstep ${step}${planned ? " of " + planned : ""}`,
      })).filter(({ x }) => Number.isFinite(x) && (!zoomed || (x >= zoomed[0] && x <= zoomed[1])));
      return { name: what, colour: colour(place), dash: DASHES[names.length > 1 ? line : Math.floor(place / 8) % DASHES.length], points };
    })).filter(Boolean);
    const drawn = plot(box, 400, progress ? "progress, % of the planned steps" : "optimizer step", title, !zoomed, !zoomed && $("curve").value !== "loss", lines);
    if (!lines.length) shape(drawn.svg, "text", { x: box.clientWidth / 2, y: 190, "text-anchor": "middle" }, "No run is chosen");
    let start = null;
    const at = (event) => drawn.from(event.clientX - drawn.svg.getBoundingClientRect().left);
    drawn.svg.addEventListener("pointerdown", (event) => { start = event.pointerType === "mouse" ? [event.clientX, at(event)] : null; });
    drawn.svg.addEventListener("pointerup", (event) => {
      if (!start || Math.abs(event.clientX - start[0]) < 12) return;
      zoomed = [start[1], at(event)].sort((a, b) => a - b);
      curves(box);
    });
    drawn.svg.addEventListener("dblclick", () => { zoomed = null; curves(box); });
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

  // --- drawn in the room that there is ----------------------------------------------------------------------------------
  const FIGURES = { "pareto-figure": pareto, "bars-figure": bars, "curves-figure": curves };
  const draw = (id) => $(id) && $(id).clientWidth && FIGURES[id]($(id));
  if ($("pick")) chooser();
  const widths = new Map();
  const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    if (widths.get(target.id) === target.clientWidth) return;
    widths.set(target.id, target.clientWidth);
    draw(target.id);
  }));
  Object.keys(FIGURES).forEach((id) => $(id) && resized.observe($(id)));
  for (const [id, figures] of Object.entries({ workload: ["pareto-figure", "bars-figure"], metric: ["bars-figure"],
    curve: ["curves-figure"], along: ["curves-figure"] })) {
    if ($(id)) $(id).addEventListener("change", () => { zoomed = id === "along" ? null : zoomed; figures.forEach(draw); });
  }
  document.documentElement.dataset.ready = "yes";
})();
