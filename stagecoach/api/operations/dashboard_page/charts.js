// Charts over time, and the bars of what is accepted where.

const CHART_SECONDS = HISTORY_SECONDS;
const ACCEPTANCE_SECONDS = 60;

// `of(index)` is the value at a sample, or null where there is none.
function drawChart(id, of, colorName, unit) {
  const { context, width, height } = surface(byId(id), 118);
  const base = height - 18;
  const quiet = color("quiet");
  const points = state.samples.map((sample, index) => ({ time: sample.time, value: of(index) }));
  const values = points.map((point) => point.value).filter((value) => value !== null);
  const highest = values.length ? Math.max(...values) : 0;
  const ceiling = highest > 0 ? niceCeiling(highest * 1.05) : 1;
  context.strokeStyle = color("line");
  for (const part of [0, 0.5, 1]) {
    const y = Math.round(base - part * (base - 8)) + 0.5;
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
  }
  context.font = "11.5px system-ui, sans-serif";
  context.fillStyle = quiet;
  context.textBaseline = "alphabetic";
  context.fillText(`−${CHART_SECONDS / 60} min`, 0, height - 3);
  context.textAlign = "right";
  context.fillText("now", width, height - 3);
  context.textAlign = "left";
  if (!points.length) return;
  const now = points[points.length - 1].time;
  const x = (time) => width * (1 - (now - time) / CHART_SECONDS);
  const y = (value) => base - (base - 8) * value / ceiling;
  for (const run of runsOf(points)) drawRun(context, run, x, y, base, color(colorName));
  if (!highest) return;
  context.fillStyle = quiet;
  context.fillText(`${ceiling.toLocaleString("en")} ${unit}`, 0, 19);
}

// Stretches of points without a gap.
function runsOf(points) {
  const runs = [[]];
  for (const point of points) {
    if (point.value === null) runs.push([]);
    else runs[runs.length - 1].push(point);
  }
  return runs.filter((run) => run.length);
}

function drawRun(context, run, x, y, base, stroke) {
  context.beginPath();
  run.forEach((point, index) => {
    context[index ? "lineTo" : "moveTo"](x(point.time), y(point.value));
  });
  context.strokeStyle = context.fillStyle = stroke;
  context.lineWidth = 1.8;
  context.lineJoin = "round";
  context.stroke();
  context.lineWidth = 1;
  context.lineTo(x(run[run.length - 1].time), base);
  context.lineTo(x(run[0].time), base);
  context.globalAlpha = 0.13;
  context.fill();
  context.globalAlpha = 1;
}

function windowLength(index) {
  const windows = growth(index, RATE_SECONDS, (stats) => stats.num_windows).amount;
  const tokens = growth(index, RATE_SECONDS, (stats) => stats.num_window_tokens).amount;
  return windows > 0 ? tokens / windows : null;
}

function generatedPerSecond(index) {
  return index > 0 ? perSecond(index, (stats) => stats.num_generated_tokens) : null;
}

function drawCharts() {
  const index = newestSample();
  drawChart("window-chart", windowLength, "window", "tokens");
  drawChart("throughput-chart", generatedPerSecond, "checkpoint", "tokens a second");
  const length = index >= 0 ? windowLength(index) : null;
  say("window-note", length === null ? "no window now" : `${length.toFixed(2)} tokens now`);
  const prompts = index > 0 ? perSecond(index, (stats) => stats.num_prompt_tokens) : 0;
  say("throughput-note", `${rate(prompts)} prompt tokens a second`);
}

// Of late, or since the start where nothing was drafted of late.
function acceptance() {
  const index = newestSample();
  const last = state.samples[index].stats.speculation;
  const first = sampleBefore(index, ACCEPTANCE_SECONDS).stats.speculation;
  const isRecent = last.num_windows > first.num_windows;
  return last.drafted_per_position.map((number, position) => ({
    drafted: number - (isRecent ? first.drafted_per_position[position] : 0),
    accepted: last.accepted_per_position[position] -
      (isRecent ? first.accepted_per_position[position] : 0),
  }));
}

function drawAcceptance() {
  const bars = byId("acceptance");
  const index = newestSample();
  const speculation = index >= 0 ? state.samples[index].stats.speculation : null;
  if (!speculation || !speculation.drafted_per_position.length) {
    const text = index < 0 ? "–" : speculation ? "Nothing was drafted yet." : "No draft model.";
    bars.replaceChildren(make("p", "quiet", text));
    say("acceptance-note", "");
    return;
  }
  if (bars.firstElementChild && bars.firstElementChild.tagName === "P") bars.replaceChildren();
  fill(bars, acceptance(), () => make("div", "bar",
    make("b", ""), make("div", "", make("i", "")), make("span", "")), (bar, item, position) => {
    bar.children[0].textContent =
      item.drafted ? `${Math.round(100 * item.accepted / item.drafted)}` : "–";
    bar.children[1].firstChild.style.height =
      `${item.drafted ? 100 * item.accepted / item.drafted : 0}%`;
    bar.children[2].textContent = String(position + 1);
    bar.title = `position ${position + 1}: ${count(item.accepted)} of ${count(item.drafted)}`;
  });
  say("acceptance-note", speculation.is_paused ? "paused: does not pay" : "% of drafts there");
}
