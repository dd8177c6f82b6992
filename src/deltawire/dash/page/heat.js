/* Panels: changed weights per tensor, and step sizes in ulps. */

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
  const steps = view.steps || doc.steps;
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
      const found = await ask(`api/steps?version=${version}`, (why) => { view.steps = { version, rows: [], note: why }; redraw(); });
      run.disabled = false;
      if (found) { view.steps = found; redraw(); }
    } } }, input, run));
  }
  if (live) target.tools.querySelector("input").max = doc.newest;
  if (!steps || !steps.rows.length) {
    target.body.replaceChildren(el("p", { class: "sub", text: steps && steps.note ? `${known}: ${steps.note}.` : "Computed from a version's delta when asked for." }));
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
