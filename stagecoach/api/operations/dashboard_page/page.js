// Asks for news about twice a second while somebody looks, and has everything drawn.

const POLL_MILLISECONDS = 500;
const RETRY_MILLISECONDS = 1500;
const ANSWER_MILLISECONDS = 12000;

const STATUS_NAMES = {
  ok: "serving", loading: "loading", recovering: "recovering", draining: "ending", dead: "dead", stalled: "stalled",
};

let timer = null;
let isAsking = false;
let lostSince = null;

function facts({ engine, version }) {
  const grid = `pp ${engine.pipeline_parallel_size} × tp ${engine.tensor_parallel_size}`;
  const total = engine.partition.reduce((sum, number) => sum + number, 0);
  const layers = `${engine.partition.length > 4 ? total : engine.partition.join(" + ")} layers`;
  const drafts = engine.num_draft_tokens
    ? `up to ${plural(engine.num_draft_tokens, "draft")}` : "no drafts";
  say("version", `Stagecoach ${version}`);
  return [grid, layers, engine.dtype, engine.device, drafts,
    `context ${count(engine.max_model_len)}`].join(" · ");
}

function showStatus(status, text, reason) {
  byId("status").dataset.status = status;
  say("status-text", text);
  const banner = byId("banner");
  banner.dataset.status = status;
  banner.hidden = !reason;
  banner.textContent = reason || "";
  byId("main").classList.toggle("stale", status === "dead" || status === "lost");
  document.title = status === "ok" ? "Stagecoach" : `${text} – Stagecoach`;
}

function drawAll() {
  const { data } = state;
  if (!data) return;
  say("model", data.models.join(", "));
  say("facts", facts(data));
  drawTiles();
  drawLanes();
  drawShares();
  drawAcceptance();
  drawCharts();
  drawSlots();
  drawMeters();
  drawRequests();
  say("clock", lostSince === null ? `as of ${new Date().toLocaleTimeString("en-GB")}` : "");
}

async function ask() {
  const headers = state.key ? { authorization: `Bearer ${state.key}` } : {};
  const response = await fetch(`dashboard/data?first_step=${firstOpenStep()}`, {
    headers, cache: "no-store", signal: AbortSignal.timeout(ANSWER_MILLISECONDS),
  });
  if (response.status === 401) return "key";
  if (!response.ok) throw new Error(`status ${response.status}`);
  absorb(await response.json());
  return "data";
}

async function poll() {
  timer = null;
  if (isAsking) return;
  isAsking = true;
  try {
    if (await ask() === "key") {
      askForKey();
      return;
    }
    lostSince = null;
    byId("main").hidden = false;
    const { status, reason } = state.data;
    showStatus(status, STATUS_NAMES[status] ?? status, reason);
    drawAll();
    schedule(POLL_MILLISECONDS);
  } catch (error) {
    lostSince ??= new Date();
    const since = lostSince.toLocaleTimeString("en-GB");
    showStatus("lost", "no connection",
      `No answer from the server since ${since} (${error.message}). Trying again.`);
    schedule(RETRY_MILLISECONDS);
  } finally {
    isAsking = false;
  }
}

function schedule(milliseconds) {
  clearTimeout(timer);
  timer = document.hidden ? null : setTimeout(poll, milliseconds);
}

function askForKey() {
  say("key-error", state.key ? "The server does not know this key." : "");
  state.key = "";
  showStatus("key", "key needed", null);
  byId("main").hidden = true;
  byId("key-form").hidden = false;
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = byId("key").value.trim();
  byId("key").value = "";
  byId("key-form").hidden = true;
  poll();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) schedule(0);
  else if (byId("key-form").hidden) poll();
});
window.addEventListener("resize", drawAll);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

buildSpans();
watchLanes();
drawTiles();
poll();
