"use strict";
// What /live tells, and the figures. score.js draws, chat.js talks; the three are one script. Times are seconds on the server's clock.
const $ = (id) => document.getElementById(id);
const LATE_S = 0.45; // the picture runs so far behind, so that a step is known before its place is reached
const KEPT_S = 62, KEPT_STEPS = 8000;
const still = matchMedia("(prefers-reduced-motion: reduce)");
const view = { frame: null, at: 0, skew: null, steps: [], samples: [], last: 0, newest: 0, paused: null, shown: null };

// ---------------------------------------------------------------- the server

const key = { get: () => sessionStorage.getItem("key") || "", set: (value) => sessionStorage.setItem("key", value) };

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

/** A request with the key, if there is one. Throws Refused with the server's own words. */
async function ask(path, options = {}) {
  const headers = { ...(options.body && { "content-type": "application/json" }), ...(key.get() && { authorization: `Bearer ${key.get()}` }) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error?.message || `${response.status} ${response.statusText}`);
}

/** The data of each server-sent event. */
async function* eventsOf(response) {
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
async function watch() {
  for (let wait = 500; !document.hidden; wait = Math.min(wait * 1.6, 8000)) {
    watching = new AbortController();
    try {
      for await (const data of eventsOf(await ask("live", { signal: watching.signal }))) {
        take(JSON.parse(data));
        wait = 500;
      }
      throw new Error("the server has closed the connection");
    } catch (error) {
      if (document.hidden) break;
      if (error.status === 401) { await unlock(); continue; }
      tell("lost", error.status ? error.message : "no connection, trying again");
    }
    await new Promise((go) => setTimeout(go, wait));
  }
  watching = null;
}
document.addEventListener("visibilitychange", () => {
  if (document.hidden) watching?.abort();
  else if (!watching) watch();
});

function unlock() {
  $("wrong").textContent = key.get() ? "The server does not know this key." : "";
  $("key").value = "";
  $("locked").showModal();
  return new Promise((open) => $("locked").addEventListener("close", () => { if ($("key").value) key.set($("key").value); open(); }, { once: true }));
}

// ---------------------------------------------------------------- what a frame says

const number = (value) => Math.round(value).toLocaleString("en");
const short = (value) => (value < 1e5 ? number(value) : value < 1e6 ? `${number(value / 1e3)}k` : `${(value / 1e6).toFixed(1)}M`);
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}\u00a0%`;
const width = (share) => `${100 * share}%`;
function words(seconds) {
  if (seconds >= 0.9995) return `${seconds.toFixed(seconds < 10 ? 2 : 1)}\u00a0s`;
  return `${seconds < 0.0995 ? (1000 * seconds).toPrecision(seconds < 0.00995 ? 2 : 3) : Math.round(1000 * seconds)}\u00a0ms`;
}
const few = (value) => (value < 10 && value > 0 ? value.toFixed(1) : number(value));
function put(id, text) { if ($(id).textContent !== text) $(id).textContent = text; }
function figure(id, text) {
  const [value, ...unit] = text.split("\u00a0");
  if ($(id).dataset.text === text) return;
  $(id).dataset.text = text;
  $(id).textContent = value;
  if (unit.length) $(id).append(Object.assign(document.createElement("small"), { textContent: unit.join(" ") }));
}
function listed(id, before, parts) { put(id, parts.length ? before + parts.join("; ") : ""); }
function tell(state, text) {
  $("state").dataset.state = state;
  put("state", text || state);
}

function take(frame) {
  const here = performance.now() / 1000, skew = frame.now_s - here;
  if (view.skew === null || Math.abs(skew - view.skew) > 1) view.skew = skew;
  view.skew += 0.05 * (skew - view.skew);
  if (frame.last_step < view.last) Object.assign(view, { steps: [], samples: [], last: 0, skew }); // another engine
  view.frame = frame;
  const fresh = Math.min(frame.steps.length, frame.last_step - view.last);
  if (fresh > 0) view.steps.push(...frame.steps.slice(-fresh));
  view.last = frame.last_step;
  view.newest = view.steps.at(-1)?.[3] ?? 0;
  const kv = frame.kv_tokens, total = kv.total || 1;
  const used = kv.total - kv.cached - kv.free;
  view.samples.push({ at: frame.now_s, running: frame.running, waiting: frame.waiting, used: used / total, cached: kv.cached / total });
  const oldest = frame.now_s - KEPT_S;
  if (view.steps.length > KEPT_STEPS || view.steps[0]?.[3] < oldest - 5) view.steps = view.steps.filter((s) => s[3] > oldest).slice(-KEPT_STEPS);
  if (view.samples[0].at < oldest - 5) view.samples = view.samples.filter((s) => s.at > oldest);
  show(frame, used, total);
  if (still.matches || view.paused !== null) draw();
}

function show(frame, used, total) {
  const about = frame.about;
  tell(frame.state, frame.state === "ready" ? "ready" : frame.reason || frame.state);
  const unit = unitWord();
  $("about").replaceChildren(Object.assign(document.createElement("b"), { textContent: about.model }),
    [about.policy, about.units && `${about.units} ${unit}`, about.context_tokens && `context ${number(about.context_tokens)}`].filter(Boolean).map((w) => ` · ${w}`).join(""));
  document.title = `${frame.running ? `${frame.running} running · ` : ""}Counterpoint`;
  put("version", about.version);
  put("unit-word", unit);
  latency("ttft", frame.ttft_s);
  latency("itl", frame.itl_s);
  figure("generated", few(frame.generated_rate));
  put("prompted", few(frame.prompt_rate));
  figure("running", `${number(frame.running)}\u00a0running`);
  put("waiting", number(frame.waiting));
  put("finished", short(frame.finished));
  figure("kv-used", percent(used / total));
  $("kv").children[0].style.width = width(used / total);
  $("kv").children[1].style.width = width(frame.kv_tokens.cached / total);
  const kvWords = `${short(used)} in use · ${short(frame.kv_tokens.cached)} cached · ${short(frame.kv_tokens.free)} free`;
  put("kv-words", kvWords);
  $("kv").setAttribute("aria-label", `KV cache: ${kvWords}`);
  put("hits", frame.hit_rate === null ? "–" : percent(frame.hit_rate));
  put("resplits", few(frame.resplit_rate));
  put("preemptions", number(frame.preemptions));
  figure("policy", about.policy || "–");
  put("lanes", about.lanes);
  doing(frame.lanes);
  workers(frame.workers);
  listed("errors", "predictions off by (p50, p95) ", Object.entries(frame.prediction_errors).map(([kind, [mid, high]]) => `${kind}\u00a0${percent(mid)}, ${percent(high)}`));
  listed("guards", "guards up to ", frame.guards.filter(([, guard]) => guard > 1).map(([cell, guard]) => `${guard.toFixed(2)} ${cell}`));
  listed("fallbacks", "not split: ", Object.entries(frame.fallbacks).map(([reason, count]) => `${reason} ${number(count)}`));
  const together = (prefill, decode) => prefill === decode && prefill === about.units; // one pass of both, or two on all units
  const splits = frame.splits.map(([prefill, decode, share]) => `${together(prefill, decode) ? "all for both" : `${prefill}\u00a0+\u00a0${decode}`} ${percent(share)}`);
  if (splits.length) splits[0] = `prefill + decode ${unit} ${splits[0]}`;
  listed("splits", "", frame.active_share === null ? splits : [`${unit} at work ${percent(frame.active_share)}`, ...splits]);
  const now = { prefill: voice(frame, 5), decode: voice(frame, 6) };
  put("now-prefill", now.prefill);
  put("now-decode", now.decode);
  const label = `Prefill ${now.prefill}. Decode ${now.decode}. ${frame.running} running, ${frame.waiting} waiting.`;
  if ($("strip").getAttribute("aria-label") !== label) $("strip").setAttribute("aria-label", label);
}
/** What runs now, or ran last within the last half second (steps are shorter than frames). */
function voice(frame, field) {
  const latest = frame.playing.find((s) => s[field]) || view.steps.findLast?.((s) => s[field] && s[3] > frame.now_s - 0.5);
  if (!latest) return "rests";
  const unit = latest[4] === 1 ? unitWord().slice(0, -1) : unitWord();
  return `${latest[4]} ${unit}, ${field === 5 ? `${number(latest[5])} tokens` : `batch of ${latest[6]}`}`;
}
function unitWord() { return /SM/.test(view.frame?.about.lanes || "") ? "SMs" : "cores"; }

/** A pool's workers: a bar of the KV that is in use, and what is on each. */
function workers(list) {
  $("pool").hidden = !list.length;
  const rows = list.map((worker) => {
    const kv = worker.kv_tokens, used = kv.total ? (kv.total - kv.cached - kv.free) / kv.total : 0;
    const moves = Object.entries(worker.handoffs).map(([state, count]) => `${number(count)} ${state}`);
    const lost = worker.pages.quarantine ? [`${number(worker.pages.quarantine)} pages in quarantine`] : [];
    const load = [`${number(worker.running)} running`, `${number(worker.waiting)} waiting`, `KV ${percent(used)}`];
    return [worker.name, worker.role, used, worker.up ? [...load, ...moves, ...lost].join(", ") : "not there"];
  });
  bars("workers", rows);
}

const IDLE = { nothing: "nothing to do", fused: "done by the other", units: "no units", policy: "held back", memory: "no pages", launch: "launching" };
/** How each lane spent the last minute, prefill above as in the score: a bar of the time it was busy, and words. */
function doing(lanes) {
  const rows = Object.entries(lanes).sort().reverse().map(([role, parts]) => {
    const rest = Object.entries(parts).filter(([what, share]) => what !== "busy" && share >= 0.005);
    const said = [`busy ${percent(parts.busy || 0)}`, ...rest.map(([what, share]) => `${IDLE[what] || what} ${percent(share)}`)].join(", ");
    return [role, role.split(/[- ]/)[0], parts.busy || 0, said];
  });
  bars("doing", rows);
}
/** Rows of a list: a name in its role's colour, a bar of a share, and words. */
function bars(id, rows) {
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

/** On a scale of five decades, 1 ms to 100 s. */
function latency(name, found) {
  for (const [i, p] of ["p50", "p90", "p99"].entries()) (i ? put : figure)(`${name}-${p}`, found ? words(found[i]) : "–");
  $(`${name}-scale`).classList.toggle("on", Boolean(found));
  if (!found) return;
  const [mid, high, top] = found.map((s) => Math.min(100, Math.max(0, 20 * Math.log10(s / 0.001))));
  const [reach, dot, tick] = $(`${name}-scale`).children;
  reach.style.left = dot.style.left = `${mid}%`;
  reach.style.width = `${top - mid}%`;
  tick.style.left = `${high}%`;
}

queueMicrotask(() => { // once score.js and chat.js have run too
  colours();
  if (innerWidth < 640) $("span").value = "6";
  requestAnimationFrame(turn);
  watch();
});
