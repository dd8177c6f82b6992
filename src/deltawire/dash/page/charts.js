/* Panels, line charts and tables. */

// ── panels ─────────────────────────────────────────────────────────────────────────────────────────────────────

function panel(name, title, kind, draw, within) {
  const sub = el("p", { class: "sub" });
  const tools = el("div", { class: "tools" });
  const body = el("div", { class: "body" });
  const root = el("section", { class: `panel ${kind}`, "aria-labelledby": `h-${name}`, "data-panel": name },
    el("header", {}, el("h2", { id: `h-${name}`, text: title }), sub, tools), body);
  panels[name] = { root, sub, tools, body, draw };
  (within ? document.querySelector(within) : $("panels")).append(root);
}

function setTools(target, ...buttons) {
  // the focus stays on the button that was pressed, although all of them are made anew
  const at = [...target.tools.children].indexOf(document.activeElement);
  target.tools.replaceChildren(...buttons);
  if (at >= 0 && target.tools.children[at]) target.tools.children[at].focus();
}

// ── line charts ────────────────────────────────────────────────────────────────────────────────────────────────

/** Times on an axis: the date where it changes or days apart, else hours and minutes, seconds if these are close. */
function dates(plot, ticks, axis, space, step) {
  let day = "";
  return ticks.map((tick) => {
    const date = new Date(tick * 1e3), today = date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    const time = step >= 86400 ? "" : step < 1 ? `${date.toLocaleTimeString("en-GB")}.${String(date.getMilliseconds()).padStart(3, "0")}` : date.toLocaleTimeString("en-GB", step < 60 ? {} : { hour: "2-digit", minute: "2-digit" });
    const shown = today === day || (day === "" && step < 86400 && ticks.at(-1) - ticks[0] < 43200) ? time : step >= 86400 ? today : `${today} ${time}`;
    day = today;
    return shown;
  });
}

const charts = new Map(); // element → {plot, sign, zoomed}

/** Draws or updates a chart. `lines` are {label, colour, values, dash, fill, step, points}; values go with `xs`. */
function chart(holder, { xs, lines, height, time, log, close, unit, describe, label, range, onZoom, sync }) {
  const width = Math.max(holder.clientWidth, 120);
  const sign = JSON.stringify([lines.map((line) => [line.colour, line.dash, line.step, line.points]), time, log, height, document.documentElement.dataset.theme]);
  const data = [xs, ...lines.map((line) => line.values)];
  const known = charts.get(holder);
  if (known && known.sign === sign) {
    known.describe = describe;
    known.range = range;
    known.plot.setData(data, !known.zoomed);
    if (known.plot.width !== width) known.plot.setSize({ width, height });
    return known.plot;
  }
  if (known) known.plot.destroy();
  const state = { sign, zoomed: false, describe, range };
  const ink = colour("soft"), grid = { stroke: colour("grid"), width: 1 }, ticks = { show: false };
  const axis = { stroke: ink, grid, ticks, font: "11px system-ui, sans-serif" };
  const options = {
    width, height, legend: { show: false }, padding: [10, 12, 0, 0],
    cursor: { points: { size: 6 }, drag: { x: true, y: false }, ...(sync ? { sync: { key: sync } } : {}) },
    scales: {
      x: { time: !!time, range: (u, low, high) => (state.range && !state.zoomed ? state.range : low === high ? [low - 1, high + 1] : [low, high]) },
      y: log ? { distr: 3 } : close ? { range: (u, low, high) => (low == null ? [0, 1] : low === high ? [low - 1, high + 1] : [low - 0.03 * (high - low), high + 0.06 * (high - low)]) } : { range: (u, low, high) => (low == null ? [0, 1] : [low >= 0 ? 0 : low - 0.05 * (high - low), high > 0 ? high * 1.08 : high === low ? 1 : 0]) },
    },
    axes: [
      { ...axis, size: 28, space: time ? 90 : 70, values: time ? dates : (u, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? `v${tick.toLocaleString("en")}` : "")) },
      { ...axis, size: 58, space: 30, values: (u, ticks) => ticks.map((tick) => (tick == null ? "" : unit(tick))) },
    ],
    series: [{}, ...lines.map((line) => ({
      stroke: colour(line.colour), width: line.width || 1.5, dash: line.dash, spanGaps: true,
      fill: line.fill ? colour("wash") : undefined,
      paths: line.step ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: { show: line.points ? true : xs.length < 40 && !line.step && !line.dash, size: line.points || 4, fill: colour(line.colour) },
      ...(line.points ? { paths: () => null } : {}),
    }))],
    hooks: {
      setCursor: [(u) => {
        if (u.cursor.left < 0 || u.cursor.idx == null || (!u.over.matches(":hover") && !state.keyed)) return;
        const bounds = u.over.getBoundingClientRect();
        const [title, rows] = state.describe(u.cursor.idx);
        tip(bounds.left + u.cursor.left, bounds.top + (state.keyed ? 10 : u.cursor.top), title, rows);
      }],
      setSelect: [(u) => {
        if (u.select.width > 2) {
          state.zoomed = true;
          if (onZoom) onZoom(Math.ceil(u.posToVal(u.select.left, "x")), Math.floor(u.posToVal(u.select.left + u.select.width, "x")));
        }
      }],
    },
  };
  const plot = new uPlot(options, data, holder);
  state.plot = plot;
  charts.set(holder, state);
  const over = plot.over;
  over.setAttribute("tabindex", "0");
  over.setAttribute("role", "application");
  over.setAttribute("aria-roledescription", "chart");
  over.setAttribute("aria-label", `${label} Arrow keys read the values, plus and minus zoom, 0 shows all.`);
  over.addEventListener("pointerleave", hideTip);
  const reset = () => {
    state.zoomed = false;
    if (onZoom) onZoom(null);
    plot.setData(plot.data, true);
  };
  over.addEventListener("dblclick", reset);
  over.addEventListener("blur", () => { state.keyed = false; hideTip(); });
  over.addEventListener("keydown", (event) => {
    const all = plot.data[0], low = plot.scales.x.min, high = plot.scales.x.max;
    if (event.key === "0") return reset();
    if (event.key === "Escape") return hideTip();
    if (event.key === "+" || event.key === "=" || event.key === "-") {
      const middle = plot.cursor.idx != null ? all[plot.cursor.idx] : (low + high) / 2;
      const half = ((high - low) / 2) * (event.key === "-" ? 2 : 0.5);
      state.zoomed = true;
      plot.setScale("x", { min: Math.max(middle - half, all[0]), max: Math.min(middle + half, all[all.length - 1]) });
      return;
    }
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 }[event.key];
    if (!step) return;
    event.preventDefault();
    state.keyed = true;
    const at = Math.max(0, Math.min(all.length - 1, (state.at ?? (step < 0 ? all.length : -1)) + step));
    state.at = at;
    plot.setCursor({ left: plot.valToPos(all[at], "x"), top: 10 });
  });
  return plot;
}

// ── tables ─────────────────────────────────────────────────────────────────────────────────────────────────────

/** Draws a table: `columns` are [heading, class]. Rows are replaced; the scrolled position and the focus stay. */
function table(target, label, columns, rows) {
  let box = target.body.querySelector(".scroll");
  if (!box) {
    box = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, el("table", {}, el("thead"), el("tbody")));
    target.body.replaceChildren(box);
  }
  box.hidden = !rows.length;
  box.querySelector("thead").replaceChildren(el("tr", {}, ...columns.map(([text, kind]) => el("th", { class: kind, scope: "col", text }))));
  box.querySelector("tbody").replaceChildren(...rows);
}
