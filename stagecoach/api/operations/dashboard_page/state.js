// What the page knows: the last answer, the plans of late, and samples of the counts over time.

const MAX_PLANS = 2048;
const HISTORY_SECONDS = 120;
const RATE_SECONDS = 3;

const state = {
  key: "",
  data: null, // the last answer
  plans: new Map(), // by step, oldest first
  samples: [], // {time, stats}, oldest first
  engineStart: null,
};

function planOf(fields) {
  const [step, launched, committed, numWindows, numChunks, numTokens, numDrafts, numAccepted,
    spans] = fields;
  return {
    step, launched, committed, numWindows, numChunks, numTokens, numDrafts, numAccepted,
    spans: spans.map((span) => span && { arrived: span[0], ended: span[1], hop: span[2] }),
  };
}

function requestOf(fields) {
  const [id, status, numPrompt, numCached, numComputed, numOutput, slot, numPages] = fields;
  return { id, status, numPrompt, numCached, numComputed, numOutput, slot, numPages };
}

// From where on a plan may have news.
function firstOpenStep() {
  let newest = -1;
  for (const plan of state.plans.values()) {
    if (plan.committed === null || plan.spans.includes(null)) return plan.step;
    newest = plan.step;
  }
  return newest + 1;
}

function forget() {
  state.plans.clear();
  state.samples = [];
  state.engineStart = null;
}

function absorb(data) {
  const { timeline, stats } = data;
  if (timeline && stats) {
    // Another engine counts from the start again.
    const start = timeline.now - stats.uptime_seconds;
    if (state.engineStart !== null && Math.abs(start - state.engineStart) > 5) forget();
    state.engineStart = start;
  }
  state.data = data;
  if (timeline) {
    for (const fields of timeline.plans) state.plans.set(fields[0], planOf(fields));
    for (const step of state.plans.keys()) {
      if (state.plans.size <= MAX_PLANS) break;
      state.plans.delete(step);
    }
  }
  if (stats) {
    const time = stats.uptime_seconds;
    state.samples.push({ time, stats });
    while (state.samples[0].time < time - HISTORY_SECONDS) state.samples.shift();
  }
}

// The sample some seconds before the one at `index`, or the first there is.
function sampleBefore(index, seconds) {
  const limit = state.samples[index].time - seconds;
  let before = index;
  while (before > 0 && state.samples[before].time > limit) before -= 1;
  return state.samples[before];
}

// Growth of `of(stats)` over the last seconds before a sample: {amount, seconds}.
function growth(index, seconds, of) {
  const last = state.samples[index];
  const first = sampleBefore(index, seconds);
  return { amount: of(last.stats) - of(first.stats), seconds: last.time - first.time };
}

function perSecond(index, of) {
  const { amount, seconds } = growth(index, RATE_SECONDS, of);
  return seconds > 0 ? amount / seconds : 0;
}

function newestSample() {
  return state.samples.length - 1;
}
