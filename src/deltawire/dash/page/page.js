/* The whole page: where its data comes from, and when it is drawn. */

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
  if (!held) { view.steps = view.zoom = view.chain = view.chainEnd = view.laneZoom = null; unzoom(); }
  doc = found;
  lookedAt = Date.now() / 1e3;
  redraw();
}

// ── data: from this file, or from the server ───────────────────────────────────────────────────────────────────

function state(text, kind) {
  $("state").textContent = text;
  $("state").className = `badge ${kind || ""}`;
}

/** What the server answers; null where it has nothing new or does not answer. `refused` gets the reason of a refusal. */
async function ask(path, refused) {
  try {
    const answer = await fetch(path, { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store" });
    if (answer.status === 204) { state("live", "live"); return null; }
    if (answer.status === 401) { askToken(); return null; }
    const found = await answer.json();
    if (!answer.ok && !refused) throw new Error(found.error);
    state("live", "live");
    if (!answer.ok) { refused(found.error); return null; }
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
  palette.clear();
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
