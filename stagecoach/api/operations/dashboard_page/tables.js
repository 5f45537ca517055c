// Single figures, slots, pages, and the requests that are alive.

const MAX_ROWS = 24;
const CLIENT_SHIFT = 2 ** 40;

function figures() {
  const index = newestSample();
  if (index < 0) {
    return ["tokens a second", "requests running", "tokens a round", "prompt from cache", "plans in flight",
      "uptime"].map((name) => ({ name, value: "–", unit: "", detail: "" }));
  }
  const { stats } = state.samples[index];
  const { speculation, prefix_cache: cache } = stats;
  const perRound = speculation && speculation.num_windows
    ? 1 + speculation.num_accepted_tokens / speculation.num_windows : null;
  return [
    {
      name: "tokens a second",
      value: rate(index > 0 ? generatedPerSecond(index) : 0),
      unit: "",
      detail: `${count(stats.num_generated_tokens)} generated`,
    },
    {
      name: "requests running",
      value: count(stats.num_running),
      unit: `of ${count(state.data.engine.max_num_seqs)}`,
      detail: `${count(stats.num_waiting)} waiting`,
    },
    {
      name: "tokens a round",
      value: perRound === null ? "–" : perRound.toFixed(2),
      unit: "",
      detail: speculation
        ? `${count(speculation.num_accepted_tokens)} of ` +
          `${plural(speculation.num_draft_tokens, "draft")}`
        : "no draft model",
    },
    {
      name: "prompt from cache",
      value: cache ? percent(cache.num_hit_tokens, cache.num_query_tokens) : "–",
      unit: "",
      detail: cache
        ? `${count(cache.num_hit_tokens)} of ${plural(cache.num_query_tokens, "token")}` : "off",
    },
    {
      name: "plans in flight",
      value: count(stats.num_plans_in_flight),
      unit: `of ${state.data.engine.pipeline_parallel_size}`,
      detail: plural(stats.num_steps, "step"),
    },
    {
      name: "uptime",
      value: duration(stats.uptime_seconds),
      unit: "",
      detail: plural(stats.num_preemptions, "preemption"),
    },
  ];
}

function drawTiles() {
  fill(byId("tiles"), figures(), () => make("div", "tile",
    make("span", ""), make("b", "", make("strong", ""), " ", make("em", "")), make("span", "")),
  (tile, figure) => {
    tile.dataset.figure = figure.name;
    tile.children[0].textContent = figure.name;
    tile.children[1].firstChild.textContent = figure.value;
    tile.children[1].lastChild.textContent = figure.unit;
    tile.children[2].textContent = figure.detail;
  });
}

function slotStates() {
  const { timeline } = state.data;
  return timeline ? Uint8Array.from(atob(timeline.slot_states), (byte) => byte.charCodeAt(0)) : [];
}

// Cells as large as a square of moderate height allows.
function drawSlots() {
  const states = slotStates();
  const canvas = byId("slots");
  const wide = canvas.clientWidth;
  const most = Math.max(1, states.length);
  let cell = 40;
  while (cell > 3 && Math.ceil(most / Math.floor(wide / cell)) * cell > 132) cell -= 1;
  const columns = Math.max(1, Math.floor(wide / cell));
  const rows = Math.min(Math.ceil(most / columns), 44);
  const { context } = surface(canvas, Math.max(rows * cell, 22));
  const colors = [color("idle"), color("window"), color("checkpoint")];
  const size = cell - (cell > 8 ? 3 : 1);
  const counts = [0, 0, 0];
  states.forEach((slot, index) => {
    counts[slot] += 1;
    const row = Math.floor(index / columns);
    if (row >= rows) return;
    context.fillStyle = colors[slot];
    context.beginPath();
    context.roundRect(index % columns * cell, row * cell, size, size, Math.min(4, size / 4));
    context.fill();
  });
  say("slots-note", states.length
    ? `${count(counts[1])} running, ${plural(counts[2], "checkpoint")}, ${count(counts[0])} free`
    : "–");
}

function meters() {
  const index = newestSample();
  if (index < 0) return [];
  const { stats } = state.samples[index];
  const cache = stats.prefix_cache;
  const found = [{
    name: "pages held by requests",
    className: "window-back",
    part: stats.num_pages - stats.num_free_pages,
    whole: stats.num_pages,
  }];
  if (!cache) return found;
  found.push({
    name: "pages with a cached prefix, held or not",
    className: "checkpoint-back",
    part: cache.num_cached_pages,
    whole: stats.num_pages,
  }, {
    name: "slots with a checkpoint",
    className: "checkpoint-back",
    part: cache.num_checkpoints,
    whole: stats.num_slots,
  });
  return found;
}

function drawMeters() {
  fill(byId("meters"), meters(), () => make("div", "meter",
    make("div", "", make("span", ""), make("span", "quiet")), track("")), (element, meter) => {
    const [name, numbers] = element.firstChild.children;
    name.textContent = meter.name;
    numbers.textContent = `${count(meter.part)} of ${count(meter.whole)}`;
    element.lastChild.firstChild.className = meter.className;
    setTrack(element.lastChild, meter.whole, meter.part);
  });
  const index = newestSample();
  const cache = index >= 0 ? state.samples[index].stats.prefix_cache : null;
  if (!cache) {
    say("pages-note", index < 0 ? "–" : "no prefix cache");
    return;
  }
  const host = `host ${bytes(cache.host_bytes)} (${count(cache.num_host_pages)} pages, ` +
    `${count(cache.num_host_checkpoints)} checkpoints)`;
  say("pages-note", `cached: device ${bytes(cache.device_bytes)}, ${host}`);
}

function requestName(id) {
  const client = Math.floor(id / CLIENT_SHIFT);
  return client ? `${client}:${id % CLIENT_SHIFT}` : String(id);
}

function drawRequests() {
  const { timeline, stats } = state.data;
  const requests = timeline && stats ? timeline.requests.map(requestOf) : [];
  fill(byId("requests"), requests.slice(0, MAX_ROWS), () => make("tr", "",
    make("td", ""), make("td", "", make("span", "state")),
    make("td", "", make("div", "progress", track("checkpoint-back", "chunk-back"),
      make("span", "quiet"))),
    make("td", ""), make("td", ""), make("td", ""), make("td", "")), (row, request) => {
    const [id, status, prompt, cached, output, slot, pages] = row.children;
    const [bar, numbers] = prompt.firstChild.children;
    const computed = Math.min(request.numComputed, request.numPrompt);
    id.textContent = requestName(request.id);
    status.firstChild.textContent = request.status;
    status.firstChild.dataset.state = request.status;
    bar.classList.toggle("done", request.status !== "prefilling");
    setTrack(bar, request.numPrompt, Math.min(request.numCached, computed),
      Math.max(0, computed - request.numCached));
    numbers.textContent = `${count(computed)} / ${count(request.numPrompt)}`;
    cached.textContent = count(request.numCached);
    output.textContent = count(request.numOutput);
    slot.textContent = request.slot === null ? "–" : String(request.slot);
    pages.textContent = count(request.numPages);
  });
  if (!stats) {
    say("requests-note", "–");
    return;
  }
  const alive = stats.num_running + stats.num_waiting;
  const hidden = Math.max(0, alive - MAX_ROWS);
  say("requests-note", alive
    ? `${count(stats.num_running)} running, ${count(stats.num_waiting)} waiting` +
      (hidden ? `; the oldest ${MAX_ROWS} are shown` : "")
    : "none");
}
