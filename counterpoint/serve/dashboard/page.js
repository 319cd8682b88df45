"use strict";
// Frames of /live and the figures. score.js draws the lanes, chat.js has the chat; the three are one script.
// Times are seconds on the server's clock.
const $ = (id) => document.getElementById(id);
const DELAY_S = 0.45; // the picture lags the server, so that each step is known before it is drawn
const HISTORY_S = 62, MAX_STEPS = 8000;
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const view = { frame: null, at: 0, skew: null, steps: [], samples: [], last: 0, newest: 0, paused: null, shown: null };

// ---------------------------------------------------------------- the server

const key = { get: () => sessionStorage.getItem("key") || "", set: (value) => sessionStorage.setItem("key", value) };

class HttpError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

/** fetch with the key, if there is one. Throws HttpError with the server's message. */
async function request(path, options = {}) {
  const headers = { ...(options.body && { "content-type": "application/json" }), ...(key.get() && { authorization: `Bearer ${key.get()}` }) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new HttpError(response.status, body?.error?.message || `${response.status} ${response.statusText}`);
}

/** Yields the data of each server-sent event. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = "", part; !(part = await reader.read()).done; ) {
      const events = (rest + part.value).split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

let watching = null;
async function watchFrames() {
  for (let wait = 500; !document.hidden; wait = Math.min(wait * 1.6, 8000)) {
    watching = new AbortController();
    try {
      for await (const data of readEvents(await request("live", { signal: watching.signal }))) {
        onFrame(JSON.parse(data));
        wait = 500;
      }
      throw new Error("the server has closed the connection");
    } catch (error) {
      if (document.hidden) break;
      if (error.status === 401) { await askForKey(); continue; }
      showState("lost", error.status ? error.message : "no connection, trying again");
    }
    await new Promise((go) => setTimeout(go, wait));
  }
  watching = null;
}
document.addEventListener("visibilitychange", () => {
  if (document.hidden) watching?.abort();
  else if (!watching) watchFrames();
});

function askForKey() {
  $("wrong").textContent = key.get() ? "The server does not know this key." : "";
  $("key").value = "";
  $("locked").showModal();
  return new Promise((open) => $("locked").addEventListener("close", () => { if ($("key").value) key.set($("key").value); open(); }, { once: true }));
}

// ---------------------------------------------------------------- frames

const formatCount = (value) => Math.round(value).toLocaleString("en");
const formatShort = (value) => (value < 1e5 ? formatCount(value) : value < 1e6 ? `${formatCount(value / 1e3)}k` : `${(value / 1e6).toFixed(1)}M`);
const formatPercent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}\u00a0%`;
const width = (share) => `${100 * share}%`;
function formatSeconds(seconds) {
  if (seconds >= 0.9995) return `${seconds.toFixed(seconds < 10 ? 2 : 1)}\u00a0s`;
  return `${seconds < 0.0995 ? (1000 * seconds).toPrecision(seconds < 0.00995 ? 2 : 3) : Math.round(1000 * seconds)}\u00a0ms`;
}
const formatRate = (value) => (value < 10 && value > 0 ? value.toFixed(1) : formatCount(value));
function putText(id, text) { if ($(id).textContent !== text) $(id).textContent = text; }
function putFigure(id, text) {
  const [value, ...unit] = text.split("\u00a0");
  if ($(id).dataset.text === text) return;
  $(id).dataset.text = text;
  $(id).textContent = value;
  if (unit.length) $(id).append(Object.assign(document.createElement("small"), { textContent: unit.join(" ") }));
}
function putList(id, before, parts) { putText(id, parts.length ? before + parts.join("; ") : ""); }
function showState(state, text) {
  $("state").dataset.state = state;
  putText("state", text || state);
}

function onFrame(frame) {
  const here = performance.now() / 1000, skew = frame.now_s - here;
  if (view.skew === null || Math.abs(skew - view.skew) > 1) view.skew = skew;
  view.skew += 0.05 * (skew - view.skew);
  if (frame.last_step < view.last) Object.assign(view, { steps: [], samples: [], last: 0, skew }); // the engine is another one
  view.frame = frame;
  const fresh = Math.min(frame.steps.length, frame.last_step - view.last);
  if (fresh > 0) view.steps.push(...frame.steps.slice(-fresh));
  view.last = frame.last_step;
  view.newest = view.steps.at(-1)?.[3] ?? 0;
  const kv = frame.kv_tokens, total = kv.total || 1;
  const used = kv.total - kv.cached - kv.free;
  view.samples.push({ at: frame.now_s, running: frame.running, waiting: frame.waiting, used: used / total, cached: kv.cached / total });
  const oldest = frame.now_s - HISTORY_S;
  if (view.steps.length > MAX_STEPS || view.steps[0]?.[3] < oldest - 5) view.steps = view.steps.filter((s) => s[3] > oldest).slice(-MAX_STEPS);
  if (view.samples[0].at < oldest - 5) view.samples = view.samples.filter((s) => s.at > oldest);
  show(frame, used, total);
  if (reducedMotion.matches || view.paused !== null) draw();
}

function show(frame, used, total) {
  const about = frame.about;
  showState(frame.state, frame.state === "ready" ? "ready" : frame.reason || frame.state);
  const unit = unitWord();
  $("about").replaceChildren(Object.assign(document.createElement("b"), { textContent: about.model }),
    [about.policy, about.units && `${about.units} ${unit}`, about.context_tokens && `context ${formatCount(about.context_tokens)}`].filter(Boolean).map((w) => ` · ${w}`).join(""));
  document.title = `${frame.running ? `${frame.running} running · ` : ""}Counterpoint`;
  putText("version", about.version);
  putText("unit-word", unit);
  showLatency("ttft", frame.ttft_s);
  showLatency("itl", frame.itl_s);
  putFigure("generated", formatRate(frame.generated_rate));
  putText("prompted", formatRate(frame.prompt_rate));
  putFigure("running", `${formatCount(frame.running)}\u00a0running`);
  putText("waiting", formatCount(frame.waiting));
  putText("finished", formatShort(frame.finished));
  putFigure("kv-used", formatPercent(used / total));
  $("kv").children[0].style.width = width(used / total);
  $("kv").children[1].style.width = width(frame.kv_tokens.cached / total);
  const kvWords = `${formatShort(used)} in use · ${formatShort(frame.kv_tokens.cached)} cached · ${formatShort(frame.kv_tokens.free)} free`;
  putText("kv-words", kvWords);
  $("kv").setAttribute("aria-label", `KV cache: ${kvWords}`);
  putText("hits", frame.hit_rate === null ? "–" : formatPercent(frame.hit_rate));
  putText("resplits", formatRate(frame.resplit_rate));
  putText("preemptions", formatCount(frame.preemptions));
  putFigure("policy", about.policy || "–");
  putText("lanes", about.lanes);
  showLanes(frame.lanes);
  showWorkers(frame.workers);
  putList("errors", "predictions off by (p50, p95) ", Object.entries(frame.prediction_errors).map(([kind, [mid, high]]) => `${kind}\u00a0${formatPercent(mid)}, ${formatPercent(high)}`));
  putList("guards", "guards up to ", frame.guards.filter(([, guard]) => guard > 1).map(([cell, guard]) => `${guard.toFixed(2)} ${cell}`));
  putList("fallbacks", "not split: ", Object.entries(frame.fallbacks).map(([reason, count]) => `${reason} ${formatCount(count)}`));
  const together = (prefill, decode) => prefill === decode && prefill === about.units; // one mixed pass, or both phases on all units
  const splits = frame.splits.map(([prefill, decode, share]) => `${together(prefill, decode) ? "all for both" : `${prefill}\u00a0+\u00a0${decode}`} ${formatPercent(share)}`);
  if (splits.length) splits[0] = `prefill + decode ${unit} ${splits[0]}`;
  putList("splits", "", frame.active_share === null ? splits : [`${unit} at work ${formatPercent(frame.active_share)}`, ...splits]);
  const now = { prefill: describePhase(frame, 5), decode: describePhase(frame, 6) };
  putText("now-prefill", now.prefill);
  putText("now-decode", now.decode);
  const label = `Prefill ${now.prefill}. Decode ${now.decode}. ${frame.running} running, ${frame.waiting} waiting.`;
  if ($("strip").getAttribute("aria-label") !== label) $("strip").setAttribute("aria-label", label);
}
/** The step of a phase that runs now, or ran in the last half second (steps are shorter than frames). */
function describePhase(frame, field) {
  const latest = frame.playing.find((s) => s[field]) || view.steps.findLast?.((s) => s[field] && s[3] > frame.now_s - 0.5);
  if (!latest) return "idle";
  const unit = latest[4] === 1 ? unitWord().slice(0, -1) : unitWord();
  return `${latest[4]} ${unit}, ${field === 5 ? `${formatCount(latest[5])} tokens` : `batch of ${latest[6]}`}`;
}
function unitWord() { return /SM/.test(view.frame?.about.lanes || "") ? "SMs" : "cores"; }

/** A pool's workers: KV in use as a bar, then load and handoffs as text. */
function showWorkers(list) {
  $("pool").hidden = !list.length;
  const rows = list.map((worker) => {
    const kv = worker.kv_tokens, used = kv.total ? (kv.total - kv.cached - kv.free) / kv.total : 0;
    const moves = Object.entries(worker.handoffs).map(([state, count]) => `${formatCount(count)} ${state}`);
    const lost = worker.pages.quarantine ? [`${formatCount(worker.pages.quarantine)} pages in quarantine`] : [];
    const load = [`${formatCount(worker.running)} running`, `${formatCount(worker.waiting)} waiting`, `KV ${formatPercent(used)}`];
    return [worker.name, worker.role, used, worker.up ? [...load, ...moves, ...lost].join(", ") : "not there"];
  });
  fillBars("workers", rows);
}

const IDLE = { nothing: "nothing to do", fused: "done by the other", units: "no units", policy: "held back", memory: "no pages", launch: "launching" };
/** Each lane's last minute, prefill first: the busy share as a bar, the rest as text. */
function showLanes(lanes) {
  const rows = Object.entries(lanes).sort().reverse().map(([role, parts]) => {
    const rest = Object.entries(parts).filter(([what, share]) => what !== "busy" && share >= 0.005);
    const said = [`busy ${formatPercent(parts.busy || 0)}`, ...rest.map(([what, share]) => `${IDLE[what] || what} ${formatPercent(share)}`)].join(", ");
    return [role, role.split(/[- ]/)[0], parts.busy || 0, said];
  });
  fillBars("doing", rows);
}
/** Fills a list with rows of a name in its role's colour, a bar of a share, and text. */
function fillBars(id, rows) {
  const text = JSON.stringify(rows);
  if ($(id).dataset.text === text) return;
  $(id).dataset.text = text;
  $(id).replaceChildren(...rows.map(([called, role, share, said]) => {
    const row = document.createElement("li"), name = document.createElement("i"), track = document.createElement("span"), told = document.createElement("small");
    name.textContent = called;
    name.className = role;
    track.className = "track";
    track.append(document.createElement("span"));
    track.firstChild.style.width = width(share);
    told.textContent = told.title = said;
    row.append(name, track, told);
    return row;
  }));
}

/** Percentiles on a scale of five decades, 1 ms to 100 s. */
function showLatency(name, found) {
  for (const [i, p] of ["p50", "p90", "p99"].entries()) (i ? putText : putFigure)(`${name}-${p}`, found ? formatSeconds(found[i]) : "–");
  $(`${name}-scale`).classList.toggle("on", Boolean(found));
  if (!found) return;
  const [mid, high, top] = found.map((s) => Math.min(100, Math.max(0, 20 * Math.log10(s / 0.001))));
  const [reach, dot, tick] = $(`${name}-scale`).children;
  reach.style.left = dot.style.left = `${mid}%`;
  reach.style.width = `${top - mid}%`;
  tick.style.left = `${high}%`;
}

queueMicrotask(() => { // after score.js and chat.js
  readColours();
  if (innerWidth < 640) $("span").value = "6";
  requestAnimationFrame(animate);
  watchFrames();
});
