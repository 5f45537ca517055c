// The lanes: for each stage what it did when, and how its time was spent.

const LANE_GAP = 12;
const AXIS = 15;
const IDLE_SECONDS = 1;
const SHARE_SECONDS = 10;
// Width of a usual block, where the time shown is chosen for the reader.
const AUTO_PIXELS = 38;
const SPANS = [["auto", null], ["50 ms", 0.05], ["250 ms", 0.25], ["1 s", 1], ["5 s", 5]];

let laneHeight = 44; // less where there are many stages

const view = {
  span: null, // seconds; null: chosen here
  auto: 0.25,
  isHeld: false, // by the button
  pointer: null, // {x, y} on the canvas: what is looked at stands still
  shown: null, // {plans, end, span, now}
};

function buildSpans() {
  const group = byId("spans");
  for (const [label, seconds] of SPANS) {
    const button = make("button", "", label);
    button.type = "button";
    button.addEventListener("click", () => {
      view.span = seconds;
      view.shown = null;
      markSpans();
      drawLanes();
    });
    group.append(button);
  }
  const hold = make("button", "", "hold");
  hold.type = "button";
  hold.addEventListener("click", () => {
    view.isHeld = !view.isHeld;
    markSpans();
    drawLanes();
  });
  group.append(hold);
  markSpans();
}

function markSpans() {
  const buttons = byId("spans").children;
  SPANS.forEach(([, seconds], index) => {
    buttons[index].setAttribute("aria-pressed", String(view.span === seconds));
  });
  buttons[SPANS.length].setAttribute("aria-pressed", String(view.isHeld));
}

// The next of 1, 2, 5, 10, ... that is not smaller.
function niceCeiling(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 5, 10].map((factor) => factor * power).find((nice) => nice >= number * 0.999);
}

function median(numbers) {
  return numbers.sort((a, b) => a - b)[Math.floor(numbers.length / 2)];
}

function choose(timeline, width) {
  const plans = [...state.plans.values()];
  let end = 0;
  let isRunning = false;
  for (const plan of plans) {
    isRunning ||= plan.committed === null;
    end = Math.max(end, plan.committed ?? plan.launched);
  }
  if (isRunning && state.data.status !== "dead") end = timeline.now;
  const recent = plans.slice(-64).flatMap((plan) => plan.spans.filter(Boolean));
  if (recent.length) {
    const typical = median(recent.map((span) => span.ended - span.arrived));
    const wanted = niceCeiling(Math.max(typical, 1e-4) * width / AUTO_PIXELS);
    // Twice as much or half of it is the same picture.
    if (wanted > 2.1 * view.auto || wanted < 0.45 * view.auto) view.auto = wanted;
  }
  return { plans, end, span: view.span ?? view.auto, now: timeline.now, isRunning };
}

function layersOf(stage) {
  const { partition } = state.data.engine;
  const start = partition.slice(0, stage).reduce((sum, number) => sum + number, 0);
  return `layers ${start}–${start + partition[stage] - 1}`;
}

function drawLanes() {
  const { data } = state;
  const stages = data.engine.partition.length;
  laneHeight = stages > 8 ? 22 : stages > 4 ? 34 : 44;
  const height = stages * (laneHeight + LANE_GAP) + AXIS;
  const { context, width } = surface(byId("lanes"), height);
  const isStill = view.shown && (view.isHeld || view.pointer);
  if (!isStill) view.shown = data.timeline && state.plans.size ? choose(data.timeline, width) : null;
  const gutter = width < 560 ? 56 : 96;
  const colors = {};
  for (const name of ["window", "chunk", "hop", "idle", "line", "text", "quiet"]) {
    colors[name] = color(name);
  }
  const frame = { context, width, gutter, colors };
  for (let stage = 0; stage < stages; stage += 1) drawLane(frame, stage, width >= 560 && laneHeight > 30);
  noteLanes(data);
  if (view.shown) {
    drawAxis(frame, stages * (laneHeight + LANE_GAP));
    const found = findPlan(frame);
    if (found) drawPath(frame, found);
    showTip(frame, found);
  } else {
    byId("tip").hidden = true;
  }
}

function laneTop(stage) {
  return stage * (laneHeight + LANE_GAP);
}

function place(frame, time) {
  const { end, span } = view.shown;
  return frame.gutter + (frame.width - frame.gutter) * (1 - (end - time) / span);
}

function drawLane(frame, stage, hasLayers) {
  const { context, width, gutter, colors } = frame;
  const y = laneTop(stage);
  context.font = "600 12.5px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = colors.text;
  context.fillText(`stage ${stage}`, 0, y + laneHeight / 2 - (hasLayers ? 8 : 0));
  if (hasLayers) {
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = colors.quiet;
    context.fillText(layersOf(stage), 0, y + laneHeight / 2 + 9);
  }
  context.fillStyle = colors.idle;
  context.beginPath();
  context.roundRect(gutter, y, width - gutter, laneHeight, 6);
  context.fill();
  if (!view.shown) return;
  context.save();
  context.clip();
  let before = 0;
  let hasOpen = false;
  for (const plan of view.shown.plans) {
    const span = plan.spans[stage];
    if (span) {
      drawBlock(frame, plan, span, y);
      before = span.ended;
    } else if (!hasOpen && plan.committed === null) {
      // Where it has come to is not known before the stage is done with it.
      hasOpen = true;
      drawOpen(frame, Math.max(plan.launched, before), y);
    }
  }
  context.restore();
}

function drawBlock(frame, plan, span, y) {
  const { context, colors, gutter, width } = frame;
  const start = place(frame, span.arrived);
  const end = place(frame, span.ended);
  if (end < gutter || start > width) return;
  const ready = place(frame, span.arrived + span.hop);
  if (ready - start > 0.4) {
    context.fillStyle = colors.hop;
    context.fillRect(start, y + laneHeight / 2 - 4, ready - start, 8);
  }
  const gap = end - ready > 5 ? 1 : 0;
  const size = Math.max(end - ready - gap, 0.8);
  const ofWindows = (plan.numWindows + plan.numDrafts) / plan.numTokens;
  const split = Math.round((laneHeight - 8) * ofWindows);
  const radius = size > 6 ? 3 : 0;
  fillRound(context, split < laneHeight - 8 ? colors.chunk : colors.window, radius,
    ready, y + 4, size, laneHeight - 8);
  if (split > 0 && split < laneHeight - 8) {
    fillRound(context, colors.window, [radius, radius, 0, 0], ready, y + 4, size, split);
  }
}

function fillRound(context, fillStyle, radii, ...box) {
  context.fillStyle = fillStyle;
  context.beginPath();
  context.roundRect(...box, radii);
  context.fill();
}

function drawOpen(frame, since, y) {
  const { context, colors } = frame;
  const start = place(frame, since);
  const size = place(frame, view.shown.now) - start;
  context.strokeStyle = colors.quiet;
  context.setLineDash([3, 3]);
  context.strokeRect(start + 0.5, y + 6.5, Math.max(size - 1, 2), laneHeight - 13);
  context.setLineDash([]);
}

function drawAxis(frame, y) {
  const { context, width, gutter, colors } = frame;
  const { span } = view.shown;
  const tick = niceCeiling(span / (width < 560 ? 3 : 8));
  context.font = "11.5px system-ui, sans-serif";
  context.fillStyle = colors.quiet;
  context.strokeStyle = colors.line;
  context.textAlign = "right";
  for (let number = 0; number * tick < span * 0.97; number += 1) {
    const x = width - (width - gutter) * number * tick / span;
    const label = number ? `−${ago(number * tick)}` : "latest";
    context.beginPath();
    context.moveTo(x - 0.5, y - LANE_GAP + 2);
    context.lineTo(x - 0.5, y - LANE_GAP + 7);
    context.stroke();
    if (x - context.measureText(label).width > gutter) context.fillText(label, x, y + 6);
  }
  context.textAlign = "left";
}

function ago(seconds) {
  const [number, unit] = seconds < 0.999 ? [1000 * seconds, "ms"] : [seconds, "s"];
  return `${Number(number.toPrecision(3))} ${unit}`;
}

function findPlan(frame) {
  if (!view.pointer) return null;
  const { x, y } = view.pointer;
  const stage = Math.floor(y / (laneHeight + LANE_GAP));
  if (y - laneTop(stage) > laneHeight || x < frame.gutter) return null;
  let nearest = null;
  let best = 4;
  for (const plan of view.shown.plans) {
    const span = plan.spans[stage];
    if (!span) continue;
    const distance = Math.max(place(frame, span.arrived) - x, x - place(frame, span.ended), 0);
    if (distance < best) [best, nearest] = [distance, { plan, stage }];
  }
  return nearest;
}

// One plan on its way through all lanes.
function drawPath(frame, { plan }) {
  const { context, colors, gutter, width } = frame;
  context.strokeStyle = context.fillStyle = colors.text;
  context.lineWidth = 1.6;
  let before = null;
  plan.spans.forEach((span, stage) => {
    if (!span) return;
    const start = Math.max(place(frame, span.arrived + span.hop), gutter);
    const end = Math.min(place(frame, span.ended), width);
    if (before !== null) {
      context.beginPath();
      context.moveTo(before, laneTop(stage - 1) + laneHeight - 4);
      context.lineTo(start, laneTop(stage) + 4);
      context.stroke();
    }
    context.strokeRect(start, laneTop(stage) + 4, Math.max(end - start, 1), laneHeight - 8);
    before = end;
  });
  context.lineWidth = 1;
}

function describe(plan, stage) {
  const span = plan.spans[stage];
  const parts = [];
  if (plan.numWindows) parts.push(plural(plan.numWindows, "window"));
  if (plan.numChunks) parts.push(plural(plan.numChunks, "chunk"));
  const lines = [
    `step ${plan.step} on stage ${stage}`,
    `${parts.join(", ")} with ${plural(plan.numTokens, "token")}`,
  ];
  if (plan.numDrafts) {
    const isDone = plan.committed !== null;
    lines.push(`${plural(plan.numDrafts, "draft")}${isDone ? `, ${plan.numAccepted} accepted` : ""}`);
  }
  const hop = stage ? `, waited ${duration(span.hop)} for stage ${stage - 1}` : "";
  lines.push(`busy ${duration(span.ended - span.arrived - span.hop)}${hop}`);
  if (plan.committed !== null) {
    lines.push(`${duration(plan.committed - plan.launched)} from launch to commit`);
  }
  return lines.join("\n");
}

function showTip(frame, found) {
  const tip = byId("tip");
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = describe(found.plan, found.stage);
  const { x } = view.pointer;
  const left = Math.min(Math.max(x - tip.offsetWidth / 2, 0), frame.width - tip.offsetWidth);
  tip.style.left = `${left}px`;
  tip.style.top = `${laneTop(found.plan.spans.length)}px`;
}

function noteLanes(data) {
  const { shown } = view;
  const canvas = byId("lanes");
  const seconds = shown && data.timeline ? data.timeline.now - shown.end : 0;
  const isDead = data.status === "dead";
  const isIdle = shown && !isDead && !shown.isRunning && seconds > IDLE_SECONDS;
  let note = "";
  if (isIdle) note = `idle for ${duration(Math.floor(seconds))}`;
  else if (isDead && shown) note = "the last plans";
  else if (isDead) note = "no plan is known";
  else if (!shown && data.timeline) note = "nothing has run yet";
  say("lanes-note", note);
  canvas.style.opacity = isIdle ? "0.45" : "1";
}

// How a stage spent its last seconds, as its lane shows it: {busy, hop, whole} in seconds, or null.
function shareOf(stage, now) {
  const plans = [...state.plans.values()];
  const spans = plans.map((plan) => plan.spans[stage]).filter(Boolean);
  if (!spans.length) return null;
  // What a plan on its way does here is told when the stage is done with it.
  const isOpen = plans.some((plan) => plan.committed === null && !plan.spans[stage]);
  const end = isOpen ? spans.at(-1).ended : now;
  const start = Math.max(end - SHARE_SECONDS, spans[0].arrived);
  const found = { busy: 0, hop: 0, whole: end - start };
  for (const { arrived, ended, hop } of spans) {
    found.hop += Math.max(0, Math.min(arrived + hop, end) - Math.max(arrived, start));
    found.busy += Math.max(0, Math.min(ended, end) - Math.max(arrived + hop, start));
  }
  return found;
}

function drawShares() {
  const { engine, timeline, status } = state.data;
  const stages = engine.partition.map((_, stage) => stage);
  const ends = [...state.plans.values()].flatMap((plan) => plan.spans).map((span) => span?.ended ?? 0);
  const now = timeline && status !== "dead" ? timeline.now : Math.max(...ends, 0);
  fill(byId("shares"), stages, () => make("div", "share",
    make("div", "", make("b", ""), make("span", "quiet")),
    track("window-back", "hop-back")), (element, stage) => {
    element.firstChild.firstChild.textContent = `stage ${stage}`;
    const { busy, hop, whole } = shareOf(stage, now) ?? { busy: 0, hop: 0, whole: 0 };
    element.firstChild.lastChild.textContent = whole > 0
      ? `busy ${percent(busy, whole)} · hop ${percent(hop, whole)} · ` +
        `idle ${percent(whole - busy - hop, whole)}`
      : "–";
    setTrack(element.lastChild, whole, busy, hop);
  });
}

function watchLanes() {
  const canvas = byId("lanes");
  const move = (event) => {
    const box = canvas.getBoundingClientRect();
    view.pointer = { x: event.clientX - box.left, y: event.clientY - box.top };
    if (state.data) drawLanes();
  };
  const leave = () => {
    view.pointer = null;
    if (state.data) drawLanes();
  };
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerdown", move);
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") leave();
  });
  document.addEventListener("pointerdown", (event) => {
    if (event.target !== canvas) leave();
  });
}
