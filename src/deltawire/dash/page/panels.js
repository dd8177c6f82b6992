/* Panels: key figures, versions over time, lag, replicas, bytes, changes, metrics, failures. */

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
    const behind = doc.replicas.find((replica) => replica.replica === head.slowest);
    const all = head.current === head.following;
    const lag = all ? "all current" : behind && behind.lag == null ? "no version known" : `${head.slowest_lag} behind`;
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
    if (replica.version != null) points.push([Math.max(seenAt(replica), points.length ? points[points.length - 1][0] : 0), replica.version]);
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
  const rows = lines.map((values, line) => [line ? doc.replicas[line - 1].replica : "trainer", text(values[index]), line ? replicaColour(line - 1) : "trainer"]);
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

// ── replicas ───────────────────────────────────────────────────────────────────────────────────────────────────

const HEALTH = { ok: "healthy", failing: "failing", silent: "silent", unread: "not read" };

function drawReplicas(target) {
  target.sub.textContent = doc.replicas.length ? "State by the latest heartbeat." : "A replica appears here with its first heartbeat.";
  const rows = doc.replicas.map((replica, index) => {
    const last = replica.syncs.filter((sync) => !sync.error).at(-1);
    const dot = el("span", { class: "dot" });
    dot.style.background = `var(--${replicaColour(index)})`;
    const drift = replica.clock_s >= 1e7 ? "its clock is wrong" : replica.clock_s ? `its clock is ${duration(replica.clock_s)} fast` : "";
    const since = replica.behind_s ? ` (${duration(replica.behind_s + (live ? Date.now() / 1e3 - lookedAt : 0))})` : "";
    return el("tr", {},
      el("td", { class: "name", title: replica.replica }, dot, replica.replica, drift ? el("small", { text: drift }) : null),
      el("td", { text: replica.version == null ? "–" : `v${count(replica.version)}` }),
      el("td", { text: replica.lag == null ? "–" : `${count(replica.lag)}${since}` }),
      el("td", { class: `name ${replica.health}`, text: HEALTH[replica.health] || "unknown", title: replica.error }),
      el("td", { text: last ? duration(last.seconds) : "–" }),
      el("td", { text: last ? duration(last.pause) : "–" }),
      el("td", { text: ago(seenAt(replica)).replace(" ago", ""), title: moment(seenAt(replica)) }));
  });
  table(target, "Replicas", [["Replica", "name"], ["Version"], ["Behind"], ["Health", "name"], ["Last sync"], ["Paused"], ["Seen"]], rows);
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
      xs: found.version, height: 120, close: true, unit: number, sync: "versions", onZoom: zoomTo, label: `${name}.`,
      lines: [{ values, colour: replicaColour(at) }],
      describe: (index) => [versionTitle(found, index), [[name, number(values[index]), replicaColour(at)], ["step", found.step[index] == null ? null : count(found.step[index])]]],
    });
  });
}

// ── failures, versions ─────────────────────────────────────────────────────────────────────────────────────────

function drawFailures(target) {
  const found = doc.replicas.flatMap((replica) => [
    ...replica.syncs.filter((sync) => sync.error).map((sync) => ({ at: sync.at, replica: replica.replica, version: sync.version, reason: sync.error, times: sync.times })),
    ...(replica.error && !replica.syncs.some((sync) => sync.error && replica.error.startsWith(sync.error)) ? [{ at: seenAt(replica), replica: replica.replica, version: null, reason: replica.error, times: 1 }] : []),
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
