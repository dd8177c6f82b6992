"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** An SVG element with attributes; text goes in as text. */
function svg(name, attributes = {}, text) {
  const element = set(document.createElementNS("http://www.w3.org/2000/svg", name), attributes);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** An HTML element: html("p", {class: "note"}, "text", child, …). */
function html(name, attributes = {}, ...children) {
  const element = set(document.createElement(name), attributes);
  element.append(...children);
  return element;
}

/** 0.0042 → "0.42 %" */
function percent(share) {
  const value = 100 * share;
  if (value === 0) return "0 %";
  if (value < 0.001) return "< 0.001 %";
  if (value >= 99.95) return "100 %";
  return `${value >= 10 ? value.toFixed(1) : value >= 1 ? value.toFixed(2) : Number(value.toPrecision(2))} %`;
}

/** 1e-6 → "1e-6", 0.0000032 → "3.2e-6" */
function rate(x) {
  const [digits, power] = x.toExponential(1).split("e");
  return `${Number(digits)}e${Number(power)}`;
}

function count(n) { return Math.round(n).toLocaleString("en-US"); }

function bytes(n) {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (n >= size) return `${n / size >= 100 ? (n / size).toFixed(0) : Number((n / size).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(n)} B`;
}

function seconds(s) {
  if (s < 1e-3) return `${Number((1e6 * s).toPrecision(2))} µs`;
  if (s < 1) return `${1e3 * s >= 100 ? (1e3 * s).toFixed(0) : (1e3 * s).toPrecision(2)} ms`;
  if (s < 120) return `${s >= 10 ? s.toFixed(0) : s.toPrecision(2)} s`;
  if (s < 7200) return `${(s / 60).toFixed(s < 600 ? 1 : 0)} min`;
  return `${(s / 3600).toFixed(1)} h`;
}

/** Radio buttons in a segmented control; calls back with the value chosen. */
function choice(place, name, options, chosen, change) {
  for (const [value, text] of options) {
    const input = html("input", {type: "radio", name, value});
    input.checked = value === chosen;
    input.addEventListener("change", () => change(value));
    place.append(html("label", {}, input, html("span", {}, text)));
  }
}

/** Draw now, and again whenever the width of an element changes. */
function onWidth(element, draw) {
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.round(element.clientWidth);
    if (width && width !== last) draw(last = width);
  }).observe(element);
}

// In a frame of the documentation: tell how high this page is, and follow the frame's light or dark scheme.
if (window.parent !== window) {
  const tellHeight = () => parent.postMessage({height: $("main").offsetHeight}, "*");
  new ResizeObserver(tellHeight).observe($("main"));
  window.addEventListener("message", event => {
    if (["light", "dark"].includes(event.data?.theme)) document.documentElement.dataset.theme = event.data.theme;
    if (event.data?.ask) tellHeight();
  });
}
