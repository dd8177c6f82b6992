/* Panel: the phases of each sync, a lane per replica. */

// ── lanes: the phases of each sync ─────────────────────────────────────────────────────────────────────────────

const LANES = 12; // replicas that are drawn before "all" is asked for
const PHASES = [["fetch", "fetch and hash"], ["decode", "decode"], ["pause", "pause: write"], ["audit", "audit: recompute the digest"]];

function phases(sync) {
  const spent = sync.phases, prove = spent.prove || 0, part = (...names) => names.reduce((sum, name) => sum + (spent[name] || 0), 0);
  const inside = spent.pause == null || spent.pause >= prove; // the proof is made within the pause
  return { fetch: part("fetch", "verify"), decode: part("decode", "stage"), pause: Math.max(sync.pause - (inside ? prove : 0), 0), audit: prove + (spent.audit || 0) };
}

function describeSync(item) {
  const { sync, replica } = item, spent = phases(sync);
  return [`${replica.replica}: v${count(sync.version)}${sync.error ? " failed" : ""}`, [
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
    pen.fillText(cut(pen, replica.replica, narrow ? width - 8 : left - 14), 2, narrow ? lane(row) + 8 : lane(row) + tall / 2);
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
