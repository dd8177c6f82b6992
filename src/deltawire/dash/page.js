"use strict";
/* The page of a run. Text from the bucket is only ever set as text: no innerHTML, no attribute that runs. */
(() => {
  const $ = (id) => document.getElementById(id);
  const LANES = 12; // replicas that are drawn before "all" is asked for
  let doc = null; // what is shown
  let live = false; // whether a server answers
  let token = "";
  let lookedAt = 0; // local time of the last document, to count seconds between two of them
  const view = { lanes: "duration", all: false, span: "recent", chainEnd: null, chain: null, behind: "versions" };
  const panels = {}; // by name: {root, sub, tools, body, draw}

  // ── elements ───────────────────────────────────────────────────────────────────────────────────────────────────

  function el(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "text") made.textContent = value;
      else if (name === "on") for (const [event, run] of Object.entries(value)) made.addEventListener(event, run);
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value != null) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child != null));
    return made;
  }

  const SVG = "http://www.w3.org/2000/svg";
  function svg(tag, attributes, text) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text != null) made.textContent = text;
    return made;
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const swatch = (name, shape) => {
    const made = el("i", { class: shape });
    made.style.background = shape === "ring" ? "none" : `var(--${name})`;
    return made;
  };
  const keys = (...items) =>
    el("div", { class: "keys" }, ...items.map(([name, text, shape]) => el("span", {}, swatch(name, shape), text)));

  function button(text, pressed, run) {
    return el("button", { type: "button", text, "aria-pressed": String(pressed), on: { click: run } });
  }

  // ── figures for people ─────────────────────────────────────────────────────────────────────────────────────────

  const round = (value, digits) => Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });

  function size(bytes) {
    if (bytes == null) return "–";
    let value = bytes;
    for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
      if (Math.abs(value) < 999.5) return `${unit === "B" || Math.abs(value) >= 99.5 ? Math.round(value) : round(value, 3)} ${unit}`;
      value /= 1000;
    }
    return `${round(value, 3)} PB`;
  }

  function percent(share) {
    if (share == null) return "–";
    const value = 100 * share;
    if (value === 0) return "0 %";
    return value < 0.005 ? "<0.01 %" : `${value < 9.995 ? value.toFixed(2) : value.toFixed(1)} %`;
  }

  function duration(seconds) {
    if (seconds == null) return "–";
    if (seconds < 0.0095) return `${round(seconds * 1e3, 2)} ms`;
    if (seconds < 0.9995) return `${Math.round(seconds * 1e3)} ms`;
    for (const [limit, divisor, unit] of [[60, 1, "s"], [3600, 60, "min"], [172800, 3600, "h"]])
      if (seconds < limit) return `${seconds / divisor < 10 ? (seconds / divisor).toFixed(1) : Math.round(seconds / divisor)} ${unit}`;
    return `${Math.round(seconds / 86400)} d`;
  }

  const times = (ratio) => (ratio == null ? "–" : ratio < 99.5 ? `${ratio.toFixed(1)}×` : `${Math.round(ratio).toLocaleString("en")}×`);
  const count = (number) => (number == null ? "–" : number.toLocaleString("en"));
  const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many || one + "s"}`;
  const number = (value) => (value == null ? "–" : Math.abs(value) >= 1e6 || (value && Math.abs(value) < 1e-4) ? value.toExponential(2) : round(value, 4));
  const weights = (n) => (n >= 1e9 ? `${round(n / 1e9, 3)} B` : n >= 1e6 ? `${round(n / 1e6, 3)} M` : n >= 1e3 ? `${round(n / 1e3, 3)} k` : count(n));
  const clock = (at) => (at == null ? "–" : new Date(at * 1e3).toLocaleTimeString("en-GB"));
  const moment = (at) => (at == null ? "–" : new Date(at * 1e3).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }));
  const now = () => (live ? Date.now() / 1e3 : doc.looked);
  const ago = (at) => (at == null ? "–" : at > now() - 1 ? "now" : `${duration(now() - at)} ago`);
  const replicaColour = (index) => `c${index % 8}`;

  // ── tooltip ────────────────────────────────────────────────────────────────────────────────────────────────────

  function tip(x, y, title, rows) {
    const box = $("tip");
    if (title == null) {
      box.hidden = true;
      return;
    }
    const lines = rows.filter((row) => row[1] != null && row[1] !== "").map(([name, value, mark]) =>
      el("div", {}, el("span", {}, mark ? swatch(mark) : null, name), el("span", { text: value })));
    box.replaceChildren(el("b", { text: title }), ...lines);
    box.hidden = false;
    const bounds = box.getBoundingClientRect();
    box.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - bounds.width - 6))}px`;
    box.style.top = `${Math.max(6, y + 16 + bounds.height > innerHeight ? y - bounds.height - 10 : y + 16)}px`;
  }
  const hideTip = () => tip(0, 0, null);
  for (const moved of ["wheel", "touchmove"]) addEventListener(moved, hideTip, { passive: true });

  /** Lets the pointer and the arrow keys choose among the items of a drawing. `at(x, y)` gives an item or null. */
  function choosable(node, label, items, at, show) {
    let chosen = -1;
    node.setAttribute("tabindex", "0");
    node.setAttribute("role", "application");
    node.setAttribute("aria-roledescription", "chart");
    node.setAttribute("aria-label", `${label} Arrow keys read the values.`);
    const place = (item) => {
      const bounds = node.getBoundingClientRect();
      const [title, rows] = show(item);
      tip(bounds.left + item.x, bounds.top + item.y, title, rows);
    };
    node.onpointermove = (event) => {
      const bounds = node.getBoundingClientRect();
      const item = at(event.clientX - bounds.left, event.clientY - bounds.top);
      if (!item) return hideTip();
      const [title, rows] = show(item);
      tip(event.clientX, event.clientY, title, rows);
    };
    node.onpointerleave = hideTip;
    node.onblur = hideTip;
    node.onkeydown = (event) => {
      const all = items();
      const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 };
      const jump = { Home: 0, End: all.length - 1 }[event.key];
      if (event.key === "Escape") return hideTip();
      if (!all.length || (jump === undefined && !steps[event.key])) return;
      event.preventDefault();
      if (jump !== undefined) chosen = jump;
      else if (all[0].row !== undefined && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
        const row = all[Math.max(chosen, 0)].row + steps[event.key];
        const found = all.findIndex((item) => item.row === row);
        if (found >= 0) chosen = found;
      } else chosen = Math.max(0, Math.min(all.length - 1, (chosen < 0 ? all.length : chosen) + steps[event.key]));
      place(all[chosen]);
    };
  }

  function canvas(holder, height, label) {
    const width = Math.max(holder.clientWidth, 120);
    let made = holder.querySelector("canvas");
    if (!made) {
      made = el("canvas");
      holder.replaceChildren(made);
    }
    const ratio = devicePixelRatio || 1;
    made.width = Math.round(width * ratio);
    made.height = Math.round(height * ratio);
    made.style.width = `${width}px`;
    made.style.height = `${height}px`;
    made.setAttribute("aria-label", label);
    const pen = made.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return [made, pen, width];
  }

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
    const sign = JSON.stringify([lines.map((line) => [line.colour, line.dash]), time, log, height, document.documentElement.dataset.theme]);
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
        y: log ? { distr: 3 } : close ? { range: (u, low, high) => (low == null ? [0, 1] : low === high ? [low - 1, high + 1] : [low, high + 0.04 * (high - low)]) } : { range: (u, low, high) => (low == null ? [0, 1] : [low >= 0 ? 0 : low - 0.05 * (high - low), high > 0 ? high * 1.08 : high === low ? 1 : 0]) },
      },
      axes: [
        { ...axis, size: 28, space: time ? 90 : 70, values: time ? dates : (u, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? `v${tick.toLocaleString("en")}` : "")) },
        { ...axis, size: 58, space: 30, values: (u, ticks) => ticks.map((tick) => (tick == null ? "" : unit(tick))) },
      ],
      series: [{}, ...lines.map((line) => ({
        stroke: colour(line.colour), width: line.width || 1.5, dash: line.dash, spanGaps: true,
        fill: line.fill ? colour("wash") : undefined,
        paths: line.step ? uPlot.paths.stepped({ align: 1 }) : undefined,
        points: { show: line.points ? true : xs.length < 40 && !line.step, size: line.points || 4, fill: colour(line.colour) },
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

  // ── key figures ────────────────────────────────────────────────────────────────────────────────────────────────

  function tile(label, value, note, bad) {
    return el("div", { class: bad ? "tile bad" : "tile" }, el("div", { class: "label", text: label }),
      el("div", { class: "value", text: value, title: value }), el("div", { class: "note", text: note }));
  }

  function drawTiles() {
    const head = doc.headline, totals = doc.totals, last = doc.recent[doc.recent.length - 1];
    const failing = doc.replicas.filter((replica) => replica.health === "failing").length;
    const full = doc.full_bytes * totals.deltas;
    const made = [
      tile("Smaller than full weights", times(head.smaller), totals.deltas ? `${size(totals.delta_bytes)} in ${plural(totals.deltas, "delta")}, not ${size(full)}` : "no delta yet"),
      tile("Newest version", doc.newest == null ? "–" : `v${count(doc.newest)}`, last ? `${ago(last.at)}${pace()}` : "none yet"),
      tile("Weights changed", percent(totals.changed_share), `mean per version, of ${weights(doc.elements)}`),
    ];
    if (!doc.replicas.length) made.push(tile("Replicas", "0", "none has sent a heartbeat"));
    else if (!head.following) made.push(tile("Slowest replica", "–", "no heartbeat was read"));
    else {
      const behind = doc.replicas.find((replica) => replica.id === head.slowest);
      const lag = behind && behind.lag == null ? "no version yet" : head.slowest_lag ? `${head.slowest_lag} behind` : "current";
      const note = `${head.slowest}${head.slowest_sync_s ? `, syncs in ${duration(head.slowest_sync_s)}` : ""}`;
      made.push(tile("Slowest replica", lag, `${note}; ${head.current} of ${head.following} current${failing ? `, ${failing} failing` : ""}`, failing > 0));
    }
    made.push(tile("Longest pause", duration(head.pause_s), head.pause_replica ? `${head.pause_replica}, v${count(head.pause_version)}` : "no sync known"));
    made.push(tile("From publish to proven", duration(head.arrival_s), head.arrival_s == null ? "no sync known" : "median of the known syncs"));
    $("tiles").replaceChildren(...made);
  }

  function pace() {
    const at = doc.recent.map((version) => version.at).filter((value) => value != null).slice(-20);
    if (at.length < 3) return "";
    const gaps = at.slice(1).map((value, index) => value - at[index]).sort((a, b) => a - b);
    return `, one every ${duration(gaps[gaps.length >> 1])}`;
  }

  // ── versions over time ─────────────────────────────────────────────────────────────────────────────────────────

  /** The version that each replica had, at the moments when something changed: [times, [trainer], [replica], …]. */
  function timeline() {
    const columns = doc.versions, fine = doc.recent.length ? doc.recent[0].version : 0;
    const order = [
      ...columns.version.map((version, index) => [columns.at[index], version]).filter(([, version]) => version < fine),
      ...doc.recent.map((version) => [version.at, version.version]),
    ].filter(([at]) => at != null);
    for (let i = 1; i < order.length; i++) order[i][0] = Math.max(order[i][0], order[i - 1][0]);
    const tables = [[order.map((pair) => pair[0]), order.map((pair) => pair[1])]];
    for (const replica of doc.replicas) {
      const points = replica.syncs.filter((sync) => !sync.error).map((sync) => [sync.at, sync.version]);
      if (replica.version != null) points.push([Math.max(replica.seen, points.length ? points[points.length - 1][0] : 0), replica.version]);
      points.sort((a, b) => a[0] - b[0]);
      tables.push([points.map((pair) => pair[0]), points.map((pair) => pair[1])]);
    }
    const xs = [...new Set(tables.flatMap((table) => table[0]))].sort((a, b) => a - b);
    const lines = tables.map(([at, values]) => {
      const found = new Array(xs.length).fill(null);
      let next = 0, current = null;
      for (let i = 0; i < xs.length; i++) {
        while (next < at.length && at[next] <= xs[i]) current = values[next++];
        // a replica is drawn from its first known sync to its last sign of life
        found[i] = next === at.length && at.length && xs[i] > at[at.length - 1] && current !== values.at(-1) ? null : current;
        if (at.length && xs[i] > at[at.length - 1] && tables[0][0] !== at) found[i] = null;
      }
      return found;
    });
    return [xs, lines];
  }

  function recentRange(xs) {
    if (view.span === "all" || !xs.length) return null;
    const alive = doc.replicas.filter((replica) => replica.health === "ok" || replica.health === "failing");
    const starts = (alive.length ? alive : doc.replicas).flatMap((replica) => replica.syncs.map((sync) => sync.at));
    const fine = doc.recent.slice(-60).map((version) => version.at).filter((at) => at != null);
    const begin = starts.length ? starts.reduce((least, at) => Math.min(least, at)) : fine.length ? fine[0] : xs[0];
    const low = Math.max(begin, xs[0]), high = xs[xs.length - 1];
    return high - low > 0 ? [low, high] : null;
  }

  function drawTime(target) {
    const [xs, lines] = timeline();
    const total = doc.replicas.length;
    target.sub.textContent = total ? `The trainer and ${plural(total, "replica")}; a replica that keeps up covers the trainer's line.` : "The trainer; no replica has sent a heartbeat.";
    setTools(target, button("Recent", view.span === "recent", () => { view.span = "recent"; unzoom(); redraw(); }),
      button("Whole run", view.span === "all", () => { view.span = "all"; unzoom(); redraw(); }));
    const holder = target.body.firstChild || target.body.appendChild(el("div", { class: "plot" }));
    const series = lines.map((values, index) => ({
      values, step: true, colour: index ? replicaColour(index - 1) : "trainer", width: index ? 1.25 : 2,
    }));
    chart(holder, {
      xs, lines: series, height: 230, time: true, close: true, unit: (tick) => (Number.isInteger(tick) ? `v${count(tick)}` : ""), range: recentRange(xs),
      label: "Versions over time.",
      describe: (index) => [moment(xs[index]), rowsAt(lines, index, (value) => (value == null ? null : `v${count(value)}`))],
    });
    if (!target.body.querySelector(".keys")) target.body.append(keys(["trainer", "trainer"], ["c0", "replicas, in the colours of the table"]));
  }

  function rowsAt(lines, index, text) {
    const rows = lines.map((values, line) => [line ? doc.replicas[line - 1].id : "trainer", text(values[index]), line ? replicaColour(line - 1) : "trainer"]);
    const shown = rows.filter((row) => row[1] != null);
    return shown.length > 14 ? [...shown.slice(0, 14), [`and ${shown.length - 14} more`, " "]] : shown;
  }

  const published = () => {
    const found = new Map();
    doc.versions.version.forEach((version, index) => found.set(version, doc.versions.at[index]));
    doc.recent.forEach((version) => found.set(version.version, version.at));
    return found;
  };

  function drawBehind(target) {
    const [xs, lines] = timeline();
    const seconds = view.behind === "seconds";
    target.sub.textContent = seconds ? "Seconds from a version's publication to its proof in a replica." : "Versions that a replica is behind the trainer.";
    setTools(target, button("Versions", !seconds, () => { view.behind = "versions"; redraw(); }),
      button("Seconds", seconds, () => { view.behind = "seconds"; redraw(); }));
    const holder = target.body.firstChild || target.body.appendChild(el("div", { class: "plot" }));
    let values;
    if (seconds) {
      const at = published();
      values = doc.replicas.map((replica) => {
        const found = new Map(replica.syncs.filter((sync) => !sync.error && at.get(sync.version) != null).map((sync) => [sync.at, Math.max(sync.at - at.get(sync.version), 0)]));
        return xs.map((x) => found.get(x) ?? null);
      });
    } else values = lines.slice(1).map((line) => line.map((value, index) => (value == null || lines[0][index] == null ? null : Math.max(lines[0][index] - value, 0))));
    const empty = !values.some((line) => line.some((value) => value != null));
    chart(holder, {
      xs, lines: values.map((line, index) => ({ values: line, colour: replicaColour(index), step: !seconds, points: seconds ? 4 : 0 })), height: 230, time: true,
      unit: (tick) => (seconds ? duration(tick) : Number.isInteger(tick) ? count(tick) : ""), range: recentRange(xs),
      label: "How far replicas are behind.",
      describe: (index) => [moment(xs[index]), rowsAt([[], ...values], index, (value) => (value == null ? null : seconds ? duration(value) : plural(value, "version"))).filter((row) => row[0] !== "trainer")],
    });
    holder.hidden = empty;
    if (empty) target.sub.textContent = "No sync of a replica is known yet.";
  }

  function unzoom() {
    for (const state of charts.values()) state.zoomed = false;
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

  // ── replicas ───────────────────────────────────────────────────────────────────────────────────────────────────

  const HEALTH = { ok: "healthy", failing: "failing", silent: "silent", unread: "not read" };

  function drawReplicas(target) {
    target.sub.textContent = doc.replicas.length ? "State by the latest heartbeat." : "A replica appears here with its first heartbeat.";
    const rows = doc.replicas.map((replica, index) => {
      const last = replica.syncs.filter((sync) => !sync.error).at(-1);
      const dot = el("span", { class: "dot" });
      dot.style.background = `var(--${replicaColour(index)})`;
      const drift = replica.clock_s ? `its clock is ${duration(Math.abs(replica.clock_s))} ${replica.clock_s > 0 ? "fast" : "slow"}` : "";
      const since = replica.behind_s ? ` (${duration(replica.behind_s + (live ? Date.now() / 1e3 - lookedAt : 0))})` : "";
      return el("tr", {},
        el("td", { class: "name", title: replica.id }, dot, replica.id, drift ? el("small", { text: drift }) : null),
        el("td", { text: replica.version == null ? "–" : `v${count(replica.version)}` }),
        el("td", { text: replica.lag == null ? "–" : `${count(replica.lag)}${since}` }),
        el("td", { class: `name ${replica.health}`, text: HEALTH[replica.health] || "unknown", title: replica.error }),
        el("td", { text: last ? duration(last.seconds) : "–" }),
        el("td", { text: last ? duration(last.pause) : "–" }),
        el("td", { text: ago(replica.seen).replace(" ago", ""), title: moment(replica.seen) }));
    });
    table(target, "Replicas", [["Replica", "name"], ["Version"], ["Behind"], ["Health", "name"], ["Last sync"], ["Paused"], ["Seen"]], rows);
  }

  // ── lanes: the phases of each sync ─────────────────────────────────────────────────────────────────────────────

  const PHASES = [["fetch", "fetch and hash"], ["decode", "decode"], ["pause", "pause: write"], ["audit", "audit: recompute the digest"]];

  function phases(sync) {
    const spent = sync.phases, prove = spent.prove || 0, part = (...names) => names.reduce((sum, name) => sum + (spent[name] || 0), 0);
    const inside = spent.pause == null || spent.pause >= prove; // the proof is made within the pause
    return { fetch: part("fetch", "verify"), decode: part("decode", "stage"), pause: Math.max(sync.pause - (inside ? prove : 0), 0), audit: prove + (spent.audit || 0) };
  }

  function describeSync(item) {
    const { sync, replica } = item, spent = phases(sync);
    return [`${replica.id}: v${count(sync.version)}${sync.error ? " failed" : ""}`, [
      ["ended", moment(sync.at)], ["from", sync.previous == null ? "nothing" : `v${count(sync.previous)}`], ["fetched", size(sync.bytes)],
      ...PHASES.map(([name, text]) => [text, spent[name] ? duration(spent[name]) : null, name]),
      ["paused in all", duration(sync.pause)], ["sync in all", duration(sync.seconds)],
      ["digest", sync.error ? null : sync.proven ? "recomputed and equal" : "predicted, not recomputed"],
      ["failed", sync.error ? `${sync.times > 1 ? `${sync.times} times: ` : ""}${sync.error}` : null],
    ]];
  }

  function drawLanes(target) {
    const all = doc.replicas.map((replica, index) => ({ replica, index })).filter(({ replica }) => replica.syncs.length);
    const shown = view.all ? all : all.slice(0, LANES);
    const byTime = view.lanes === "time";
    target.sub.textContent = all.length
      ? byTime ? "When each sync ran, by the store's clock. Drag to zoom, double click for all." : "The latest syncs of each replica, as tall as they took; first loads are left out."
      : "No heartbeat tells of a sync yet.";
    setTools(target, button("Duration", !byTime, () => { view.lanes = "duration"; redraw(); }),
      button("Timeline", byTime, () => { view.lanes = "time"; redraw(); }),
      all.length > LANES ? button(view.all ? `Show ${LANES}` : `Show all ${all.length}`, view.all, () => { view.all = !view.all; redraw(); }) : "");
    const holder = target.body.firstChild || target.body.appendChild(el("div", { class: "plot" }));
    if (!target.body.querySelector(".keys")) target.body.append(keys(...PHASES, ["bad", "failed"]));
    const narrow = holder.clientWidth < 560;
    const tall = byTime ? 26 : 54, axis = 22, left = narrow ? 0 : 170;
    const [node, pen, width] = canvas(holder, Math.max(shown.length * tall + axis, 40), "Syncs.");
    const colours = Object.fromEntries([...PHASES.map(([name]) => name), "bad", "card", "grid", "ink", "soft"].map((name) => [name, colour(name)]));
    const items = [];
    const right = width - 6;
    const lane = (row) => row * tall;
    shown.forEach(({ replica }, row) => {
      pen.fillStyle = colours.grid;
      pen.fillRect(0, lane(row) + tall - 1, width, 1);
      pen.fillStyle = narrow ? colours.soft : colours.ink;
      pen.textAlign = "left";
      pen.fillText(cut(pen, replica.id, narrow ? width - 8 : left - 14), 2, narrow ? lane(row) + 8 : lane(row) + tall / 2);
    });
    if (byTime) laneTimes(pen, shown, items, { left, right, tall, width, axis, colours, narrow });
    else laneDurations(pen, shown, items, { left, right, tall, width, axis, colours, narrow });
    const close = (x, y) => {
      let best = null, least = 9;
      for (const item of items) {
        if (y < item.top || y > item.bottom) continue;
        const far = x < item.low ? item.low - x : x > item.high ? x - item.high : 0;
        if (far < least) [best, least] = [item, far];
      }
      return best;
    };
    choosable(node, "Syncs of each replica.", () => items, close, describeSync);
    let from = null;
    node.onpointerdown = byTime ? (event) => { from = event.offsetX; } : null;
    node.onpointerup = byTime ? (event) => {
      if (from != null && Math.abs(event.offsetX - from) > 6) {
        const [low, high] = view.laneRange;
        const at = (x) => low + ((x - left) / (right - left)) * (high - low);
        view.laneZoom = [at(Math.min(from, event.offsetX)), at(Math.max(from, event.offsetX))];
        redraw();
      }
      from = null;
    } : null;
    node.ondblclick = byTime ? () => { view.laneZoom = null; redraw(); } : null;
  }

  function cut(pen, text, width) {
    if (pen.measureText(text).width <= width) return text;
    let keep = text.length;
    while (keep > 3 && pen.measureText(`…${text.slice(-keep)}`).width > width) keep--;
    return `…${text.slice(-keep)}`;
  }

  function laneDurations(pen, shown, items, { left, right, tall, axis, colours, narrow }) {
    const counted = (replica) => replica.syncs.filter((sync) => sync.previous != null || sync.error).slice(-60);
    const most = Math.max(12, ...shown.map(({ replica }) => counted(replica).length));
    const pitch = (right - left) / most, wide = Math.max(1, Math.min(pitch - 2, 22));
    const sums = shown.flatMap(({ replica }) => counted(replica).map((sync) => sum(phases(sync)))).sort((a, b) => a - b);
    // one sync that took very long must not flatten all others: it is cut
    const tallest = Math.max(1e-6, Math.min(sums.at(-1) || 0, 2 * (sums[Math.floor(0.9 * sums.length)] || 0)));
    const room = tall - (narrow ? 20 : 12);
    shown.forEach(({ replica }, row) => {
      const syncs = counted(replica), floor = row * tall + tall - 3;
      syncs.forEach((sync, index) => {
        const x = right - (syncs.length - index) * pitch + (pitch - wide) / 2;
        const spent = phases(sync);
        let y = floor;
        for (const [name] of PHASES) {
          const high = Math.min((spent[name] / tallest) * room, y - floor + room);
          pen.fillStyle = colours[name];
          pen.fillRect(x, y - high, wide, high);
          y -= high;
        }
        if (sum(spent) > tallest) {
          pen.fillStyle = colours.card;
          pen.fillRect(x - 1, floor - room + 5, wide + 2, 2);
        }
        if (sync.error) cross(pen, x + wide / 2, Math.min(y, floor - 4) - 5, colours.bad);
        items.push({ sync, replica, row, low: x, high: x + wide, top: row * tall, bottom: row * tall + tall, x: x + wide / 2, y: row * tall + 8 });
      });
      const newest = syncs.at(-1);
      if (newest && row === shown.length - 1) {
        pen.fillStyle = colours.soft;
        pen.textAlign = "right";
        pen.fillText("newest sync", right, floor + axis - 6);
        pen.textAlign = "left";
        pen.fillText(`full height ${duration(tallest)}${sums.at(-1) > tallest ? ", cut where longer" : ""}`, left, floor + axis - 6);
      }
    });
  }

  const sum = (spent) => Object.values(spent).reduce((total, value) => total + value, 0);

  function cross(pen, x, y, stroke) {
    pen.strokeStyle = stroke;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.moveTo(x - 3, y - 3); pen.lineTo(x + 3, y + 3); pen.moveTo(x + 3, y - 3); pen.lineTo(x - 3, y + 3);
    pen.stroke();
  }

  function laneTimes(pen, shown, items, { left, right, tall, axis, colours, narrow }) {
    const every = shown.flatMap(({ replica }) => replica.syncs.filter((sync) => sync.previous != null || sync.error));
    if (!every.length) return;
    const begin = Math.min(...every.map((sync) => sync.at - sync.seconds)), end = Math.max(...every.map((sync) => sync.at));
    const [low, high] = (view.laneRange = view.laneZoom || [begin - 0.02 * (end - begin + 1), end + 0.02 * (end - begin + 1)]);
    const x = (at) => left + ((at - low) / (high - low)) * (right - left);
    shown.forEach(({ replica }, row) => {
      const top = row * tall + (narrow ? 14 : 6), thick = tall - (narrow ? 17 : 12);
      for (const sync of replica.syncs) {
        const start = x(sync.at - sync.seconds), stop = x(sync.at);
        if (stop < left || start > right || (sync.previous == null && !sync.error)) continue;
        const spent = phases(sync), total = Math.max(sum(spent), 1e-9), wide = Math.max(stop - start, 3);
        let at = Math.max(start, left);
        for (const [name] of PHASES) {
          const part = Math.min((spent[name] / total) * wide, right - at);
          pen.fillStyle = colours[name];
          if (part > 0) pen.fillRect(at, top, part, thick);
          at += Math.max(part, 0);
        }
        if (sync.error) cross(pen, Math.max(start, left) + wide / 2, top + thick / 2, colours.bad);
        items.push({ sync, replica, row, low: start, high: start + wide, top: row * tall, bottom: row * tall + tall, x: start, y: row * tall + 8 });
      }
    });
    pen.fillStyle = colours.soft;
    const floor = shown.length * tall + axis / 2, ticks = Math.max(2, Math.floor((right - left) / 130));
    for (let i = 0; i <= ticks; i++) {
      const at = low + ((high - low) * i) / ticks;
      pen.textAlign = i === 0 ? "left" : i === ticks ? "right" : "center";
      pen.fillText(high - low < 5 ? `${clock(at)}.${String(Math.floor((at % 1) * 1e3)).padStart(3, "0")}` : clock(at), x(at), floor);
    }
  }

  // ── bytes, changed weights, metrics ────────────────────────────────────────────────────────────────────────────

  function columns() {
    return view.zoom || doc.versions;
  }

  /** A zoom into merged points asks the server for the versions themselves. */
  async function zoomTo(first, last) {
    if (first == null || !live || Math.max(...doc.versions.count) === 1) {
      if (view.zoom) { view.zoom = null; redraw(); }
      return;
    }
    const found = await ask(`api/versions?first=${Math.max(first, 0)}&last=${Math.max(last, 0)}`);
    if (found && found.version.length > 1) { view.zoom = found; unzoom(); redraw(); }
  }

  function versionTitle(found, index) {
    return found.count[index] > 1 ? `v${count(found.version[index] - found.count[index] + 1)} to v${count(found.version[index])}, mean` : `v${count(found.version[index])}`;
  }

  function drawBytes(target) {
    const found = columns(), full = doc.full_bytes;
    target.sub.textContent = doc.totals.deltas
      ? `A follower of every version is spared ${size(doc.headline.saved_bytes)}. Logarithmic.`
      : "No delta yet.";
    const holder = target.body.firstChild || target.body.appendChild(el("div", { class: "plot" }));
    const anchors = found.version.map((version, index) => (found.anchor[index] ? full : null));
    chart(holder, {
      xs: found.version, height: 210, log: true, unit: size, sync: "versions", onZoom: zoomTo, label: "Bytes per version.",
      lines: [
        { values: found.version.map(() => full || null), colour: "full", dash: [5, 4] },
        { values: found.bytes.map((value) => value || null), colour: "accent", step: found.version.length < 400 },
        { values: anchors, colour: "pause", points: 6 },
      ],
      describe: (index) => [versionTitle(found, index), [
        ["to fetch", size(found.bytes[index]), "accent"], ["full weights", size(full), "full"], ["smaller", found.bytes[index] ? times(full / found.bytes[index]) : null],
        ["", found.anchor[index] ? "full weights were written too" : null, "pause"], ["", found.skip[index] ? "with a skip delta" : null], ["published", moment(found.at[index])]]],
    });
    if (!target.body.querySelector(".keys")) target.body.append(keys(["accent", "bytes to fetch"], ["full", "full weights"], ["pause", "anchor"]));
  }

  function drawChanged(target) {
    const found = columns();
    target.sub.textContent = "Share of all weights whose bits differ from the version before.";
    const holder = target.body.firstChild || target.body.appendChild(el("div", { class: "plot" }));
    chart(holder, {
      xs: found.version, height: 210, unit: percent, sync: "versions", onZoom: zoomTo, label: "Changed weights.",
      lines: [{ values: found.changed.map((value, index) => (found.version[index] === 0 ? null : value)), colour: "accent", fill: true }],
      describe: (index) => [versionTitle(found, index), [["changed", percent(found.changed[index]), "accent"], ["weights", count(Math.round(found.changed[index] * doc.elements))], ["step", found.step[index] == null ? null : count(found.step[index])]]],
    });
  }

  function drawMetrics(target) {
    const found = columns(), names = Object.keys(found.metrics).filter((name) => found.metrics[name].some((value) => value != null));
    target.root.hidden = !names.length;
    target.sub.textContent = "As the trainer published them with its versions.";
    const holder = target.body.firstChild || target.body.appendChild(el("div", { class: "small" }));
    if (holder.dataset.names !== JSON.stringify(names)) {
      for (const old of holder.querySelectorAll(".plot")) { if (charts.has(old)) charts.get(old).plot.destroy(); charts.delete(old); }
      holder.replaceChildren(...names.map((name) => el("div", {}, el("h3", {}, name, el("b")), el("div", { class: "plot" }))));
      holder.dataset.names = JSON.stringify(names);
    }
    names.forEach((name, at) => {
      const values = found.metrics[name], box = holder.children[at];
      const last = values.filter((value) => value != null).at(-1);
      box.querySelector("b").textContent = number(last);
      chart(box.querySelector(".plot"), {
        xs: found.version, height: 120, unit: number, sync: "versions", onZoom: zoomTo, label: `${name}.`,
        lines: [{ values, colour: replicaColour(at) }],
        describe: (index) => [versionTitle(found, index), [[name, number(values[index]), replicaColour(at)], ["step", found.step[index] == null ? null : count(found.step[index])]]],
      });
    });
  }

  // ── the chain ──────────────────────────────────────────────────────────────────────────────────────────────────

  async function moveChain(by, room) {
    const end = by == null ? null : Math.max(room - 1, Math.min((view.chainEnd ?? doc.newest) + by, doc.newest));
    view.chainEnd = end == null || end >= doc.newest ? null : end;
    view.chain = null;
    if (view.chainEnd != null && live && view.chainEnd - room < doc.recent[0].version) {
      view.chain = await ask(`api/chain?first=${Math.max(view.chainEnd - room + 1, 0)}&last=${view.chainEnd}`);
    }
    redraw();
  }

  function drawChain(target) {
    const holder = target.body.firstChild || target.body.appendChild(el("div", { class: "plot" }));
    const width = Math.max(holder.clientWidth, 240), room = Math.max(6, Math.floor((width - 28) / 30) + 1);
    const end = view.chainEnd ?? doc.newest;
    const known = new Map([...doc.recent, ...(view.chain || [])].map((version) => [version.version, version]));
    const first = Math.max(end - room + 1, 0), oldest = live ? 0 : doc.recent.length ? doc.recent[0].version : 0;
    const proven = doc.recent.filter((version) => version.proven).length;
    target.sub.textContent = `${plural(doc.totals.deltas, "delta")}, ${plural(doc.totals.anchors, "anchor")}, ${plural(doc.totals.skips, "skip delta")}; a filled circle was proven by a replica (${proven} of the newest ${doc.recent.length}).`;
    const page = Math.max(1, room - 4);
    const tools = [button("◀ Earlier", false, () => moveChain(-page, room)), button("Later ▶", false, () => moveChain(page, room)), button("Newest", view.chainEnd == null, () => moveChain(null, room))];
    tools[0].disabled = first <= oldest;
    tools[1].disabled = tools[2].disabled = view.chainEnd == null;
    setTools(target, ...tools);
    const height = 138, line = 74;
    const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    const pitch = (width - 36) / Math.max(Math.min(room - 1, Math.max(end - first, 8)), 1);
    const x = (version) => 18 + (version - first) * pitch;
    const items = [];
    const add = (...arguments_) => drawing.append(svg(...arguments_));
    for (let version = first; version <= end; version++) {
      const found = known.get(version);
      if (!found) {
        add("circle", { cx: x(version), cy: line, r: 3, fill: "none", stroke: "var(--faint)", "stroke-dasharray": "2 2" });
        items.push({ version, x: x(version), y: line, found: null });
        continue;
      }
      for (const link of found.links) {
        if (link.kind === "delta" && link.base === found.parent && version - link.base === 1) {
          add("line", { x1: x(version - 1) + 7, x2: x(version) - 7, y1: line, y2: line, stroke: "var(--accent)", "stroke-width": thickness(link.bytes) });
        } else if (link.kind === "delta") {
          const from = Math.max(x(link.base), -30), middle = (from + x(version)) / 2, high = Math.min(16 + 3 * (version - link.base), 60);
          add("path", { d: `M${from},${line - 8} Q${middle},${line - high - 8} ${x(version)},${line - 8}`, fill: "none", stroke: "var(--skip)", "stroke-width": 1.5, "stroke-dasharray": link.base < first ? "4 3" : "none" });
        } else {
          add("rect", { x: x(version) - 7, y: line + 18, width: 14, height: 14, rx: 2, fill: link.kind === "anchor" ? "var(--pause)" : "none", stroke: "var(--pause)", "stroke-width": 1.5 });
          add("line", { x1: x(version), x2: x(version), y1: line + 8, y2: line + 18, stroke: "var(--pause)", "stroke-width": 1.5 });
        }
      }
      add("circle", { cx: x(version), cy: line, r: 6, fill: found.proven ? "var(--good)" : "var(--card)", stroke: found.proven ? "var(--good)" : "var(--faint)", "stroke-width": 1.5 });
      if (found.tags.length) add("text", { x: x(version), y: 12, "text-anchor": "middle", fill: "var(--ink)", "font-size": 11 }, found.tags.join(", ").slice(0, 24));
      items.push({ version, x: x(version), y: line, found });
    }
    const every = pitch * 2 < 64 ? 2 : 1;
    for (let version = end; version >= first; version -= every)
      add("text", { x: x(version), y: height - 8, "text-anchor": "middle", fill: "var(--soft)", "font-size": 10.5 }, `v${version}`);
    holder.replaceChildren(drawing);
    choosable(drawing, "The chain of versions.", () => items, (px, py) => items.find((item) => Math.abs(item.x - px) < pitch / 2) || null, describeVersion);
    if (!target.body.querySelector(".keys"))
      target.body.append(keys(["accent", "delta, thicker if larger"], ["skip", "skip delta"], ["pause", "anchor: full weights"], ["good", "proven"], ["", "not known to be proven", "ring"]));
  }

  const thickness = (bytes) => 1.5 + 3.5 * Math.max(0, Math.min(1, 1 + Math.log10(Math.max(bytes, 1) / Math.max(doc.full_bytes, 1)) / 3));

  const PUBLISHED = { held: "training blocked", encode: "encoded in", put: "uploaded in" };

  function describeVersion({ version, found }) {
    if (!found) return [`v${count(version)}`, [["", "pruned, or not read"]]];
    return [`v${count(version)}${found.tags.length ? ` (${found.tags.join(", ")})` : ""}`, [
      ["published", moment(found.at)], ["step", found.step == null ? null : count(found.step)], ["changed", percent(found.changed)],
      ...found.links.map((link) => [link.kind === "delta" ? `delta from v${count(link.base)}${link.encoding ? `, ${link.encoding}` : ""}` : link.kind, size(link.bytes)]),
      ...(doc.trainer.filter((one) => one.version === version).flatMap((one) => Object.entries(one.phases).map(([name, spent]) => [PUBLISHED[name] || name, duration(spent)]))),
      ["proven by", found.proven ? plural(found.proven, "replica") : "no replica that is known"],
      ...Object.entries(found.metrics).map(([name, value]) => [name, number(value)]),
    ]];
  }

  // ── heat map ───────────────────────────────────────────────────────────────────────────────────────────────────

  function drawHeat(target) {
    const heat = doc.heat;
    target.root.hidden = !heat && !live;
    if (!heat) {
      target.sub.textContent = "From the headers of deltas.";
      target.body.replaceChildren();
      setTools(target, moreHeat());
      return;
    }
    const rows = heat.tensors.length, wide = heat.versions.length;
    target.sub.textContent = `${plural(wide, "version")} × ${heat.grouped ? `${count(heat.grouped)} tensors in ${rows} groups` : plural(rows, "tensor")}, read from the headers of deltas.`;
    setTools(target, live ? moreHeat() : "");
    let holder = target.body.querySelector(".plot");
    if (!holder) {
      holder = el("div", { class: "plot" });
      target.body.replaceChildren(holder, el("div", { class: "plot legend" }));
    }
    const narrow = holder.clientWidth < 560, left = narrow ? 0 : Math.min(250, holder.clientWidth * 0.28), axis = 20;
    const tall = Math.max(Math.min(rows * 16, 420), 24);
    const [node, pen, width] = canvas(holder, tall + axis, "Changed weights per tensor.");
    const ramp = ["h0", "h1", "h2", "h3", "h4"].map((name) => rgb(colour(name)));
    const cellWide = (width - left) / wide, cellTall = tall / rows;
    for (let column = 0; column < wide; column++)
      for (let row = 0; row < rows; row++) {
        pen.fillStyle = shade(ramp, heat.shares[column][row]);
        pen.fillRect(left + column * cellWide, row * cellTall, cellWide + (cellWide > 4 ? -0.5 : 0.5), cellTall + (cellTall > 4 ? -0.5 : 0.5));
      }
    pen.fillStyle = colour("soft");
    pen.textAlign = "right";
    if (!narrow) {
      const every = Math.max(1, Math.ceil(13 / cellTall));
      for (let row = 0; row < rows; row += every) pen.fillText(cut(pen, heat.tensors[row], left - 10), left - 6, (row + Math.min(every, rows - row) / 2) * cellTall);
    }
    pen.textAlign = "center";
    const every = Math.max(1, Math.ceil(54 / cellWide));
    for (let column = wide - 1; column >= 0; column -= every) {
      const at = left + (column + 0.5) * cellWide;
      pen.textAlign = at > width - 24 ? "right" : at < left + 20 ? "left" : "center";
      pen.fillText(`v${count(heat.versions[column])}`, pen.textAlign === "right" ? width : at, tall + axis / 2 + 2);
    }
    const item = (column, row) => ({ column, row, x: left + (column + 0.5) * cellWide, y: (row + 0.5) * cellTall });
    choosable(node, "Changed weights per tensor and version.", () => {
      const all = [];
      for (let row = 0; row < rows; row++) for (let column = 0; column < wide; column++) all.push(item(column, row));
      return all;
    }, (x, y) => {
      const column = Math.floor((x - left) / cellWide), row = Math.floor(y / cellTall);
      return column >= 0 && column < wide && row >= 0 && row < rows ? item(column, row) : null;
    }, ({ column, row }) => [heat.tensors[row], [["version", `v${count(heat.versions[column])}`], ["changed", percent(heat.shares[column][row])]]]);
    legend(target.body.querySelector(".legend"), ramp, left);
  }

  const LOW = -5; // 0.001 %
  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  function shade(ramp, share) {
    if (!(share > 0)) return `rgb(${ramp[0]})`;
    const at = Math.max(0, Math.min(1, (Math.log10(share) - LOW) / -LOW)) * (ramp.length - 1), low = Math.min(Math.floor(at), ramp.length - 2);
    return `rgb(${ramp[low].map((value, index) => Math.round(value + (ramp[low + 1][index] - value) * (at - low)))})`;
  }

  function legend(holder, ramp, left) {
    const [, pen, width] = canvas(holder, 26, "Legend.");
    const long = Math.min(400, width - left - 20);
    for (let i = 0; i < long; i++) {
      pen.fillStyle = shade(ramp, 10 ** (LOW * (1 - i / long)));
      pen.fillRect(left + i, 4, 1.5, 8);
    }
    pen.fillStyle = colour("soft");
    for (const power of long < 340 ? [-5, -3, -2, -1, 0] : [-5, -4, -3, -2, -1, 0]) {
      pen.textAlign = power === -5 ? "left" : power === 0 ? "right" : "center";
      pen.fillText(`${Number((100 * 10 ** power).toPrecision(1))} %`, left + long * (1 - power / LOW), 20);
    }
  }

  function moreHeat() {
    return button("Read more versions", false, async (event) => {
      event.target.disabled = true;
      const have = new Set(doc.heat ? doc.heat.versions : []);
      const wanted = doc.recent.map((version) => version.version).filter((version) => !have.has(version)).slice(-16);
      if (!wanted.length) return;
      const found = await ask(`api/tensors?versions=${wanted.join(",")}`);
      if (found) { doc.heat = found; redraw(); }
    });
  }

  // ── steps in ulps ──────────────────────────────────────────────────────────────────────────────────────────────

  function drawSteps(target) {
    const steps = doc.steps;
    target.root.hidden = !live && !(steps && steps.rows.length);
    const known = steps && steps.version != null ? `v${count(steps.version)}` : "";
    target.sub.textContent = steps && steps.rows.length ? `${known}: how far its changed weights moved, in representable values.` : "How far changed weights moved, in representable values.";
    if (live && !target.tools.firstChild) {
      const input = el("input", { type: "number", min: "0", "aria-label": "Version", placeholder: "version" });
      input.style.width = "84px";
      const run = el("button", { type: "submit", text: "Compute" });
      target.tools.append(el("form", { class: "tools", on: { submit: async (event) => {
        event.preventDefault();
        run.disabled = true;
        const version = input.value === "" ? doc.newest : Number(input.value);
        const found = await ask(`api/steps?version=${version}`);
        run.disabled = false;
        if (found) { doc.steps = found; redraw(); }
      } } }, input, run));
    }
    if (!steps || !steps.rows.length) {
      target.body.replaceChildren(el("p", { class: "sub", text: steps && steps.note ? `${known}: ${steps.note}. “Compute” fetches it.` : "Computed from a version's delta when asked for." }));
      return;
    }
    const total = steps.rows.reduce((all, row) => all + row[1] + row[2], 0), most = Math.max(...steps.rows.flatMap((row) => [row[1], row[2]]), 1);
    const bar = (kind, value) => {
      const made = el("div", { class: `bar ${kind}`, title: count(value) });
      made.style.width = `${(100 * value) / most}%`;
      return el("div", { class: kind === "down" ? "side left" : "side" }, made);
    };
    const cells = [el("span", { class: "head", text: "ulps" }), el("span", { class: "head n", text: "down" }), el("span", { class: "head", text: "up" }), el("span", { class: "head n", text: "share" })];
    for (const [ulps, up, down] of steps.rows) cells.push(el("span", { text: ulps }), bar("down", down), bar("up", up), el("span", { class: "n", text: percent((up + down) / total) }));
    target.body.replaceChildren(el("div", { class: "steps", role: "img", "aria-label": steps.rows.map(([ulps, up, down]) => `${ulps} ulps: ${percent((up + down) / total)}`).join(", ") }, ...cells),
      el("p", { class: "sub", text: `${count(total)} changed weights.` }));
  }

  // ── failures, versions ─────────────────────────────────────────────────────────────────────────────────────────

  function drawFailures(target) {
    const found = doc.replicas.flatMap((replica) => [
      ...replica.syncs.filter((sync) => sync.error).map((sync) => ({ at: sync.at, replica: replica.id, version: sync.version, reason: sync.error, times: sync.times })),
      ...(replica.error && !replica.syncs.some((sync) => sync.error && replica.error.startsWith(sync.error)) ? [{ at: replica.seen, replica: replica.id, version: null, reason: replica.error, times: 1 }] : []),
    ]).sort((a, b) => b.at - a.at).slice(0, 100);
    target.sub.textContent = found.length ? "Failed syncs and polls. After each of them a replica still serves the version that it had." : "No replica tells of a failure.";
    const title = (one) => [clock(one.at), one.replica, one.version == null ? "" : `to v${count(one.version)}`, one.times > 1 ? plural(one.times, "time") : ""].filter(Boolean).join(" · ");
    target.body.replaceChildren(el("ul", { class: "failures", tabindex: found.length ? "0" : null, "aria-label": "Failures" },
      ...found.map((one) => el("li", {}, el("span", { class: "sub", text: title(one), title: moment(one.at) }), el("div", { text: one.reason })))));
  }

  function drawVersions(target) {
    const metrics = Object.keys(doc.versions.metrics).slice(0, 4);
    target.sub.textContent = `The newest ${Math.min(doc.recent.length, 50)}.`;
    const rows = doc.recent.slice(-50).reverse().map((version) => {
      const main = version.links.find((link) => link.kind === "delta" && link.base === version.parent) || version.links[0];
      const kinds = version.links.map((link) => (link.kind !== "delta" ? link.kind : link.base === version.parent ? `delta${link.encoding ? `, ${link.encoding}` : ""}` : `skip from v${link.base}`));
      return el("tr", {}, el("td", {}, `v${count(version.version)}`, ...version.tags.map((tag) => el("span", { class: "tag", text: tag }))),
        el("td", { class: "name", text: kinds.join(" + "), title: main && main.why ? main.why : "" }), el("td", { text: version.parent == null ? "–" : percent(version.changed) }), el("td", { text: main ? size(main.bytes) : "–" }),
        el("td", { text: main && main.kind === "delta" && main.bytes ? times(doc.full_bytes / main.bytes) : "–" }), el("td", { text: version.step == null ? "–" : count(version.step) }),
        ...metrics.map((name) => el("td", { text: number(Object.hasOwn(version.metrics, name) ? version.metrics[name] : null) })), el("td", { text: version.proven ? plural(version.proven, "replica") : "–" }), el("td", { text: ago(version.at), title: moment(version.at) }));
    });
    table(target, "Versions", [["Version"], ["Content", "name"], ["Changed"], ["To fetch"], ["Smaller"], ["Step"], ...metrics.map((name) => [name]), ["Proven by"], ["Published"]], rows);
  }

  // ── the whole page ─────────────────────────────────────────────────────────────────────────────────────────────

  panel("time", "Versions over time", "", drawTime);
  panel("behind", "Lag", "", drawBehind);
  panel("lanes", "Syncs", "", drawLanes);
  panel("replicas", "Replicas", "", drawReplicas);
  panel("bytes", "Bytes per version", "", drawBytes);
  panel("changed", "Changed weights", "", drawChanged);
  panel("metrics", "Metrics", "wide", drawMetrics);
  panel("chain", "Chain", "wide", drawChain);
  panel("heat", "Changed weights per tensor", "two", drawHeat);
  $("panels").append(el("div", { class: "stack" }));
  panel("steps", "Step sizes", "", drawSteps, ".stack");
  panel("failures", "Failures", "", drawFailures, ".stack");
  panel("versions", "Versions", "wide", drawVersions);

  function redraw() {
    if (!doc) return;
    const name = doc.model || doc.url.replace(/[?].*$/, "").replace(/[/]+$/, "").split("/").pop() || "run";
    $("name").textContent = name;
    document.title = `${doc.newest == null ? "" : `v${doc.newest} · `}${name} · deltawire`;
    $("about").textContent = [doc.url, doc.elements ? `${weights(doc.elements)} weights in ${plural(doc.tensors, "tensor")}, ${size(doc.full_bytes)} in full` : ""].filter(Boolean).join(" · ");
    $("problem").hidden = !doc.problem;
    $("problem").textContent = doc.problem;
    const empty = doc.newest == null;
    $("tiles").hidden = $("panels").hidden = empty;
    $("empty").hidden = !empty;
    $("empty").textContent = doc.run ? "The run has no version yet. The first one appears here as soon as it is published." : "There is no run at this address yet. It appears here as soon as it is created.";
    $("foot").replaceChildren(...doc.notes.map((note) => el("p", { text: note })),
      el("p", { text: `Looked at ${moment(doc.looked)}. Publication times are by the trainer's clock, those of syncs by the store's.` }));
    if (empty) return;
    drawTiles();
    for (const target of Object.values(panels)) {
      try {
        target.root.hidden = false;
        target.draw(target);
      } catch (error) {
        target.sub.textContent = "This part could not be drawn.";
        console.error(error);
      }
    }
  }

  function show(found) {
    const held = doc && doc.run === found.run ? doc : null;
    if (!held) { view.zoom = view.chain = view.chainEnd = view.laneZoom = null; unzoom(); }
    doc = found;
    lookedAt = Date.now() / 1e3;
    redraw();
  }

  // ── data: from this file, or from the server ───────────────────────────────────────────────────────────────────

  function state(text, kind) {
    $("state").textContent = text;
    $("state").className = `badge ${kind || ""}`;
  }

  async function ask(path) {
    try {
      const answer = await fetch(path, { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store" });
      if (answer.status === 204) { state("live", "live"); return null; }
      if (answer.status === 401) { askToken(); return null; }
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error);
      state("live", "live");
      return found;
    } catch (error) {
      state("connection lost, retrying", "lost");
      return null;
    }
  }

  let waiting = false;
  function askToken() {
    waiting = true;
    state("token needed", "lost");
    $("ask").hidden = false;
    if (token) $("ask").querySelector("label").textContent = "This token is not the server's. Another one:";
    token = "";
  }

  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    token = $("token").value;
    $("token").value = "";
    $("ask").hidden = true;
    waiting = false;
  });

  async function follow(needed) {
    let revision = "";
    const hash = new URLSearchParams(location.hash.slice(1));
    if (hash.get("token")) {
      // in the part of the address that no server sees, and not left there
      token = hash.get("token");
      history.replaceState(null, "", location.pathname);
    }
    live = true;
    if (needed && !token) askToken();
    for (;;) {
      if (!waiting) {
        const found = await ask(`api/run?have=${revision}`);
        if (found) { revision = found.revision; show(found.document); }
      }
      await new Promise((done) => setTimeout(done, document.hidden ? 5000 : 800));
    }
  }

  /** A file that is written again and again, behind a web server: take the newer data. */
  async function refresh() {
    for (;;) {
      await new Promise((done) => setTimeout(done, 15000));
      try {
        const text = await (await fetch(location.href, { cache: "no-cache" })).text();
        const found = JSON.parse(new DOMParser().parseFromString(text, "text/html").getElementById("data").textContent);
        if (found && found.looked > doc.looked) { show(found); state(`as of ${moment(doc.looked)}`); }
      } catch { /* the page stays as it is */ }
    }
  }

  // ── colours, size ──────────────────────────────────────────────────────────────────────────────────────────────

  const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let theme = "auto";
  try { theme = localStorage.getItem("deltawire-theme") || "auto"; } catch { /* not for files in some browsers */ }
  function setTheme() {
    if (!THEMES[theme]) theme = "auto";
    document.documentElement.dataset.theme = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
    $("theme").textContent = THEMES[theme];
    $("theme").setAttribute("aria-label", `Colours: ${theme === "auto" ? "as the system" : theme}`);
    redraw();
  }
  $("theme").addEventListener("click", () => {
    const all = Object.keys(THEMES);
    theme = all[(all.indexOf(theme) + 1) % all.length];
    try { localStorage.setItem("deltawire-theme", theme); } catch { /* kept for this page only */ }
    setTheme();
  });
  dark.addEventListener("change", setTheme);

  let width = innerWidth, resizing = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(resizing);
    resizing = setTimeout(redraw, 120);
  });

  setTheme();
  const embedded = JSON.parse($("data").textContent);
  if (embedded && embedded !== "token") {
    show(embedded);
    state(`as of ${moment(doc.looked)}`);
    if (location.protocol.startsWith("http")) refresh();
  } else follow(embedded === "token");
  setInterval(() => { if (live && doc && doc.newest != null && !document.hidden) { drawTiles(); drawReplicas(panels.replicas); } }, 1000);
})();
