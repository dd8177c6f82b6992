/* Panel: the chain of anchors, deltas and skip deltas. */

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
  const shown = [...known.values()].filter(({ version }) => version >= first && version <= end);
  const arcs = shown.some((version) => version.tags.length || version.links.some((link) => link.kind === "delta" && version.version - link.base > 1));
  const line = arcs ? 74 : 20, height = line + 64;
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
