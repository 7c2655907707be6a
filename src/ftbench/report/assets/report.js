"use strict";
// Text of runs is set as text, never as HTML.
(() => {
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

  // --- the table ------------------------------------------------------------------------------------------------------
  const table = $("runs"), body = table.tBodies[0], line = table.tHead.rows[0];
  const rows = [...body.rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
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
        (!numbers.length || numbers.includes(row.id.slice(4)));
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
    const known = cellsOf(head).map((cell) => {
      const text = cell.dataset.v ?? cell.textContent, number = Number(text.replace(/,(?=\d{3})| [A-Z]{3}$/g, ""));
      return [cell.parentNode, text && Number.isFinite(number) ? number : text];
    });
    known.sort(([a, x], [b, y]) => {
      const emptyX = x === "", emptyY = y === ""; // unknown values come last in both orders
      if (emptyX || emptyY) return emptyX - emptyY || a.dataset.i - b.dataset.i;
      const order = typeof x === "number" && typeof y === "number" ? x - y : collator.compare(String(x), String(y));
      return (rising ? order : -order) || a.dataset.i - b.dataset.i;
    });
    body.append(...known.map(([row]) => row));
    [...line.cells].forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    filter();
  }

  filter();
  document.documentElement.dataset.ready = "yes";
})();
