/* Elements, figures for people, tooltip, canvas. Text from the bucket is only ever set as text: no innerHTML. */
"use strict";

const $ = (id) => document.getElementById(id);
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

const palette = new Map(); // by name, for the theme that is shown
function colour(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return palette.get(name);
}
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
const seenAt = (replica) => doc.looked - replica.seen_s;

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
