"use strict";
// The script only uses the JSON block of this page. Text of runs is set as text, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const make = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== undefined && text !== null) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  const some = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

  // --- light and dark -------------------------------------------------------------------------------------------------
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  });

  // Long lists show their first entries, and a search for the others.
  const LONG = 60, SHORT = 24;
  const wordsIn = (input) => input.value.toLowerCase().split(/\s+/).filter(Boolean);
  [...document.querySelectorAll("[data-long]")].filter((list) => list.children.length > LONG).forEach((list) => {
    const entries = [...list.children], texts = entries.map((entry) => entry.textContent.toLowerCase());
    const tools = make("div", null, { class: "tools long" }), label = make("label", "Search ");
    const search = make("input", null, { type: "search" }), all = make("button", null, { type: "button" });
    let most = SHORT;
    const show = () => {
      const words = wordsIn(search);
      let found = 0;
      entries.forEach((entry, i) => {
        const fits = words.every((word) => texts[i].includes(word));
        found += fits;
        entry.hidden = !fits || found > most;
      });
      all.hidden = found <= most;
      all.textContent = `Show all ${found}`;
    };
    const whole = () => { most = Infinity; show(); };
    search.addEventListener("input", () => { most = SHORT; show(); });
    all.addEventListener("click", whole);
    addEventListener("beforeprint", whole);
    label.append(search);
    tools.append(label, all);
    (list.closest("table") || list).before(tools);
    show();
  });

  // Short names of items by recipe, batch and GPU, and the parts that all items share.
  const PARTS = [(item) => item.way, (item) => `batch ${item.batch}`, (item) => item.gpu.replace(/^NVIDIA /, "")];
  function apart(items) {
    const varying = PARTS.filter((part) => new Set(items.map(part)).size > 1);
    const shown = varying.length ? varying : PARTS.slice(0, 1);
    return { names: items.map((item) => shown.map((part) => part(item)).join(", ")),
      shared: items.length > 1 ? PARTS.filter((part) => !shown.includes(part)).map((part) => part(items[0])).join(", ") : "" };
  }

  // --- the table ------------------------------------------------------------------------------------------------------
  const table = $("runs"), body = table.tBodies[0], line = table.tHead.rows[0];
  const rows = [...body.rows];
  const texts = rows.map((row) => {
    const run = data.runs[Number(row.dataset.i)];
    return [row.textContent, run.method, run.gpu, run.reason, run.workload].join(" ").toLowerCase();
  });
  const collator = new Intl.Collator(["ja", "en"], { numeric: true });
  const MOST_ROWS = 300; // in the table at first
  let most = MOST_ROWS;

  function filter() {
    const words = wordsIn($("filter"));
    const numbers = words.filter((word) => /^runs?:/.test(word)).flatMap((word) => word.split(/[:,]/).slice(1));
    const others = words.filter((word) => !/^runs?:/.test(word)), state = $("state").value;
    let found = 0;
    [...body.rows].forEach((row) => {
      const place = Number(row.dataset.i);
      const fits = (!state || row.dataset.s === state) && others.every((word) => texts[place].includes(word)) &&
        (!numbers.length || numbers.includes(String(data.runs[place].number)));
      found += fits;
      row.hidden = !fits || found > most;
    });
    $("count").textContent = found === rows.length ? some(found, "run") : `${found} of ${some(rows.length, "run")}`;
    table.classList.remove("first");
    $("rest").hidden = found <= most;
    $("whole").textContent = `Show all ${found} rows`;
  }
  for (const id of ["filter", "state"]) $(id).addEventListener("input", () => { most = MOST_ROWS; filter(); });
  const whole = () => { most = Infinity; filter(); };
  $("whole").addEventListener("click", whole);
  addEventListener("beforeprint", whole);

  // A link to runs filters the table.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.evidence");
    if (!link) return;
    event.preventDefault();
    $("state").value = "";
    $("filter").value = `runs:${link.dataset.runs.trim().split(" ").join(",")}`;
    filter();
    $("all-runs").scrollIntoView();
  });

  const cellsOf = (head) => { const place = [...line.cells].indexOf(head); return rows.map((row) => row.cells[place]); };
  function heading(head) { head.querySelector("button").addEventListener("click", () => sort(head)); }
  [...line.cells].forEach(heading);

  function sort(head) {
    const rising = head.getAttribute("aria-sort") !== "ascending";
    const known = cellsOf(head).map((cell) => [cell.parentNode, cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v)]);
    known.sort(([a, x], [b, y]) => {
      const emptyX = x === "", emptyY = y === ""; // unknown values come last in both orders
      if (emptyX || emptyY) return emptyX - emptyY || a.dataset.i - b.dataset.i;
      const order = typeof x === "number" && typeof y === "number" ? x - y : collator.compare(x, y);
      return (rising ? order : -order) || a.dataset.i - b.dataset.i;
    });
    body.append(...known.map(([row]) => row));
    [...line.cells].forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    filter();
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
    const parts = [close, make("h2", run.id, { id: "details-title" }),
      make("p", [`${run.way}, batch ${run.batch}`, run.workload, run.gpu].join(" · "))];
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
    for (const [name, pairs] of [["Figures", figures], ["Spec", asked],
      ["Applied (read from live objects)", applied], ["Machine", machine]]) {
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
  const colour = (i) => `var(--c${i % 8})`; // CSS variables, so that the theme can change without redrawing
  const DASHES = ["", "7 4", "2 3", "7 3 2 3", "12 5"];

  // A scale from values to pixels, with round ticks; with `zero` it starts at 0.
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

  // An empty chart with a legend of [name, colour, dash], if there are at most 24 names.
  function canvas(box, height, names) {
    const svg = document.createElementNS(NS, "svg"), width = box.clientWidth;
    for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width: "100%" })) svg.setAttribute(key, value);
    const legend = make("div", null, { class: "legend" });
    for (const [name, line, dash] of names.length <= 24 ? names : []) {
      const item = make("span"), key = document.createElementNS(NS, "svg");
      key.setAttribute("viewBox", "-12 -7 24 14");
      shape(key, "path", { d: "M-12,0H12", class: "line", style: `stroke: ${line}`, "stroke-dasharray": dash });
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

  // Show the text of the mark nearest to the pointer: marks are [x, y, text].
  function hover(box, svg, marks) {
    const tip = make("div", null, { class: "tip", role: "tooltip", hidden: "" });
    box.append(tip);
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
    svg.addEventListener("pointermove", (event) => {
      const edge = svg.getBoundingClientRect(), x = event.clientX - edge.left, y = event.clientY - edge.top;
      let best = null, least = 40;
      for (const mark of marks) {
        const far = Math.hypot(mark[0] - x, mark[1] - y);
        if (far < least) [best, least] = [mark, far];
      }
      tip.hidden = !best;
      if (!best) return;
      tip.textContent = best[2];
      tip.style.left = `${Math.max(0, Math.min(x + 12, edge.width - tip.offsetWidth))}px`;
      tip.style.top = `${best[1] + 16}px`;
    });
  }

  // Draw series {name, colour, dash, points: [{x, y, text}]} as lines with gaps at unknown values.
  function plot(box, height, xTitle, yTitle, xZero, yZero, series) {
    const every = series.flatMap((each) => each.points);
    const svg = canvas(box, height, series.map((each) => [each.name, each.colour, each.dash]));
    const bottom = height - 46, width = box.clientWidth, marks = [];
    const ys = scaled(every.map((point) => point.y), bottom, 28, yZero, 6);
    const left = 14 + 7.5 * Math.max(...ys.ticks.map(([, text]) => text.length));
    const xs = scaled(every.map((point) => point.x), left, width - 16, xZero, width < 520 ? 4 : 8);
    axis(svg, ys, left, width - 8, yTitle, true);
    axis(svg, xs, bottom, 28, xTitle, false);
    for (const each of series) {
      const group = shape(svg, "g", { class: "series" });
      const places = each.points.map((point) => Number.isFinite(point.y) ? [xs.to(point.x), ys.to(point.y)] : null);
      const path = places.map((at, i) => at ? `${i && places[i - 1] ? "L" : "M"}${at[0].toFixed(1)},${at[1].toFixed(1)}` : "").join("");
      shape(group, "path", { d: path, class: "line", style: `stroke: ${each.colour}`, "stroke-dasharray": each.dash });
      each.points.forEach((point, i) => places[i] && marks.push([...places[i], point.text]));
    }
    hover(box, svg, marks);
    return { svg, xs };
  }

  // --- curves ----------------------------------------------------------------------------------------------------------
  const methods = [...new Set(data.runs.map((run) => run.method))];

  // Curves are little-endian arrays in base64, unpacked when first drawn.
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
  };
  const picked = new Set();
  let zoomed = null;

  function curves(box) {
    const [names, title] = CURVES[$("curve").value];
    const progress = $("along").value === "progress";
    const indices = [...picked], told = apart(indices.map((index) => data.runs[index])), count = new Map();
    told.names.forEach((name) => count.set(name, (count.get(name) || 0) + 1));
    const kinds = indices.map((index) => methods.indexOf(data.runs[index].method)); // one run each: use the colours of the other charts
    const hues = new Set(kinds).size === kinds.length ? kinds : [...kinds.keys()];
    const lines = indices.flatMap((index, place) => names.map((name, part) => {
      const found = series(index, name);
      if (!found) return null;
      const own = told.names[place] + (count.get(told.names[place]) > 1 ? `, run ${data.runs[index].number}` : "");
      const planned = data.curves[index].planned, what = names.length > 1 ? `${own}: ${name}` : own;
      const points = found.steps.map((step, i) => ({
        x: progress ? (planned ? (step / planned) * 100 : NaN) : step, y: found.values[i] ?? NaN,
        text: `${what}\n${(found.values[i] ?? NaN).toPrecision(5)} ${title.split(", ").pop()}\nstep ${step}${planned ? " of " + planned : ""}`,
      })).filter(({ x }) => Number.isFinite(x) && (!zoomed || (x >= zoomed[0] && x <= zoomed[1])));
      return { name: what, colour: colour(hues[place]), dash: DASHES[names.length > 1 ? part : Math.floor(place / 8) % DASHES.length], points };
    })).filter(Boolean);
    const drawn = plot(box, 400, progress ? "progress, % of the planned steps" : "optimizer step", title, !zoomed, !zoomed && $("curve").value !== "loss", lines);
    if (!lines.length) shape(drawn.svg, "text", { x: box.clientWidth / 2, y: 190, "text-anchor": "middle" }, indices.length ? "The selected runs do not have this curve" : "No run is selected");
    $("curves-shared").textContent = told.shared ? `All: ${told.shared}.` : "";
    let start = null;
    const at = (event) => drawn.xs.from(event.clientX - drawn.svg.getBoundingClientRect().left);
    drawn.svg.addEventListener("pointerdown", (event) => { start = event.pointerType === "mouse" ? [event.clientX, at(event)] : null; });
    drawn.svg.addEventListener("pointerup", (event) => {
      if (!start || Math.abs(event.clientX - start[0]) < 12) return;
      zoomed = [start[1], at(event)].sort((a, b) => a - b);
      curves(box);
    });
    drawn.svg.addEventListener("dblclick", () => { zoomed = null; curves(box); });
  }

  const withCurves = Object.keys(data.curves).map(Number), FIRST = 6, MOST = 150;
  // The initial selection: per recipe and GPU the successful run with the most steps, then the fastest of these.
  function pickFirst() {
    if (!$("pick")) return;
    const longest = new Map(), rate = (index) => data.runs[index].rate;
    withCurves.forEach((index) => {
      const run = data.runs[index], key = `${run.way} ${run.gpu}`, before = longest.get(key);
      if (run.state !== "ok") return;
      const more = before === undefined ? 1 : data.curves[index].steps - data.curves[before].steps || rate(index) - rate(before);
      if (more > 0) longest.set(key, index);
    });
    picked.clear();
    (longest.size ? [...longest.values()].sort((a, b) => rate(b) - rate(a)) : withCurves).slice(0, FIRST).forEach((index) => picked.add(index));
    list();
  }

  function list() {
    const words = wordsIn($("pick-filter"));
    const own = withCurves, { names } = apart(own.map((index) => data.runs[index]));
    const labels = own.map((index, i) => [index, `${data.runs[index].number}: ${names[i]}${data.runs[index].state === "ok" ? "" : ` (${data.runs[index].state})`}`]);
    const found = labels.filter(([index, label]) => {
      const text = `${label} ${data.runs[index].id} ${data.runs[index].gpu}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const items = found.slice(0, MOST).map(([index, label]) => {
      const item = make("label"), box = make("input", null, { type: "checkbox" });
      box.checked = picked.has(index);
      box.addEventListener("change", () => { box.checked ? picked.add(index) : picked.delete(index); tell(); draw(); });
      item.append(box, make("span", label));
      return item;
    });
    if (found.length > MOST) items.push(make("span", `${found.length - MOST} more: filter to see them`, { class: "quiet" }));
    $("pick").replaceChildren(...items);
    tell();
  }
  const tell = () => { $("picked").textContent = `(${picked.size} of ${withCurves.length})`; };
  if ($("pick")) $("pick-filter").addEventListener("input", list);

  // --- drawing and resizing ---------------------------------------------------------------------------------------------
  const figure = $("curves-figure");
  let drawnAt = 0;
  function draw() { if (figure && figure.clientWidth) { drawnAt = figure.clientWidth; curves(figure); } }
  filter();
  pickFirst();
  draw();
  if (figure) {
    new ResizeObserver(() => figure.clientWidth !== drawnAt && draw()).observe(figure);
    for (const id of ["curve", "along"]) $(id).addEventListener("change", () => { zoomed = id === "along" ? null : zoomed; draw(); });
  }
  document.documentElement.dataset.ready = "yes";
})();
