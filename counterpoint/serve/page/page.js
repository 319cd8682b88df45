"use strict";
// Draws what /live tells, and chats with /v1/chat/completions. Times from the server are seconds on its own clock.
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
  put("resplits", number(frame.resplits));
  put("preemptions", number(frame.preemptions));
  figure("policy", about.policy || "–");
  put("lanes", about.lanes);
  doing(frame.lanes);
  const errors = Object.entries(frame.prediction_errors);
  put("errors", errors.length ? `predictions off by ${errors.map(([kind, share]) => `${kind}\u00a0${percent(share)}`).join(", ")}` : "");
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

const IDLE = { nothing: "nothing to do", fused: "done by the other", units: "no units", policy: "held back", memory: "no pages", launch: "launching" };
/** How each lane spent the last minute, prefill above as in the score: a bar of the time it was busy, and words. */
function doing(lanes) {
  const rows = Object.entries(lanes).sort().reverse().map(([role, parts]) => {
    const rest = Object.entries(parts).filter(([what, share]) => what !== "busy" && share >= 0.005);
    return [role, parts.busy || 0, [`busy ${percent(parts.busy || 0)}`, ...rest.map(([what, share]) => `${IDLE[what] || what} ${percent(share)}`)].join(", ")];
  });
  const text = JSON.stringify(rows);
  if ($("doing").dataset.text === text) return;
  $("doing").dataset.text = text;
  $("doing").replaceChildren(...rows.map(([role, busy, said]) => {
    const row = document.createElement("li"), name = document.createElement("i"), track = document.createElement("span"), told = document.createElement("small");
    name.textContent = role === "both" ? "both" : role;
    name.className = role;
    track.className = "track";
    track.append(document.createElement("span"));
    track.firstChild.style.width = width(busy);
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

// ---------------------------------------------------------------- the score

const canvas = $("strip"), pen = canvas.getContext("2d");
let ink = {}, pointer = null;
function colours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "card", "ink", "faint", "line", "prefill", "decode", "serif", "sans"]) ink[name] = style.getPropertyValue(`--${name}`).trim();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours(); draw(); });
new ResizeObserver(() => draw()).observe(canvas);

/** Where everything stands: the staff of the two voices, then the rows of requests and KV. */
function layout() {
  const width = canvas.clientWidth, height = canvas.clientHeight, narrow = width < 560;
  const gutter = narrow ? 58 : 74, row = narrow ? 38 : 46, top = 34;
  const staff = { y: top, h: height - top - 2 * (row + 16) - 46 };
  const requests = { y: staff.y + staff.h + 34, h: row }, kv = { y: staff.y + staff.h + 34 + row + 14, h: row };
  return { width, height, left: gutter, right: width - 14, staff, requests, kv, narrow };
}

function draw() {
  const ratio = devicePixelRatio || 1, box = layout();
  if (!box.width) return;
  if (canvas.width !== Math.round(box.width * ratio) || canvas.height !== Math.round(box.height * ratio)) {
    canvas.width = Math.round(box.width * ratio);
    canvas.height = Math.round(box.height * ratio);
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, box.width, box.height);
  const span = Number($("span").value), clock = performance.now() / 1000 + (view.skew ?? 0);
  const now = (view.paused ?? (still.matches && view.frame ? view.frame.now_s : clock)) - LATE_S;
  const scale = (box.right - box.left) / span, x = (at) => box.right - (now - at) * scale;
  view.shown = { box, now, scale };
  staff(box, now, span, x);
  pen.save();
  pen.beginPath();
  pen.rect(box.left, 0, box.right - box.left, box.height);
  pen.clip();
  if (view.frame) notes(box, now, span, x);
  if (view.frame?.state === "ready" && !view.frame.playing.length && !(view.newest > now - span)) rest(box);
  rows(box, now, x);
  pen.restore();
  edges(box, span);
}

function staff(box, now, span, x) {
  const units = view.frame?.about.units || 2, lines = units <= 16 ? units : 8;
  pen.strokeStyle = ink.line;
  pen.lineWidth = 1;
  pen.beginPath();
  for (let i = 0; i <= lines; i++) {
    const y = Math.round(box.staff.y + (box.staff.h * i) / lines) + 0.5;
    pen.moveTo(box.left, y);
    pen.lineTo(box.right, y);
  }
  for (const row of [box.requests, box.kv]) {
    pen.moveTo(box.left, row.y + row.h + 0.5);
    pen.lineTo(box.right, row.y + row.h + 0.5);
  }
  const beat = span > 20 ? 5 : 1;
  for (let at = Math.ceil((now - span) / beat) * beat; at <= now; at += beat) {
    const place = Math.round(x(at)) + 0.5;
    pen.moveTo(place, box.staff.y);
    pen.lineTo(place, box.staff.y + box.staff.h);
  }
  pen.stroke();
}

/** Nothing is to be seen. */
function rest(box) {
  const text = "Both voices rest.", middle = (box.left + box.right) / 2, y = box.staff.y + box.staff.h / 2;
  pen.font = `italic 17px ${ink.serif}`;
  const half = pen.measureText(text).width / 2 + 12;
  pen.fillStyle = ink.card;
  pen.fillRect(middle - half, y - 12, 2 * half, 24);
  pen.fillStyle = ink.faint;
  pen.textAlign = "center";
  pen.fillText(text, middle, y + 6);
}

/** [y, height] of a step: prefill has the low end of the device (above), decode the high end (below). */
function place(step, box) {
  const units = view.frame.about.units || 1, h = (box.staff.h * Math.min(step[4], units)) / units;
  const below = view.frame.about.roles[step[0]] === "decode";
  return [below ? box.staff.y + box.staff.h - h : box.staff.y, h];
}

function notes(box, now, span, x) {
  const passes = new Map(), drawn = new Map(), from = now - span;
  let batch = 0, told = -1e9;
  const one = (step, running) => {
    const end = running ? now : Math.min(step[3], now);
    if (end < from || step[2] >= now) return;
    const [y, h] = place(step, box), left = x(step[2]), right = Math.max(x(end), left + 1);
    if (step[5]) {
      const pass = passes.get(step[1]);
      if (pass) { pass.right = right; pass.steps++; } else passes.set(step[1], { left, right, y, h, steps: 1, tokens: step[5], mixed: step[6], running });
    }
    const drawnTo = drawn.get(step[0]) ?? -1e9;
    if (right - drawnTo < 0.75) return;
    drawn.set(step[0], right);
    bar(Math.max(left, drawnTo > left + 1 ? drawnTo : left), y, right, h, step, running);
    const much = step[6] >= 1.5 * batch || step[6] <= batch / 1.5;
    if (step[6] && step[6] !== batch && left - told > (much ? 30 : 90) && left < box.right - 20) {
      batch = step[6];
      told = left;
      pen.fillStyle = ink.decode;
      pen.globalAlpha = 1;
      pen.font = `italic 13px ${ink.serif}`;
      pen.textAlign = "left";
      pen.fillText(`×${batch}`, left, box.staff.y + box.staff.h + 16);
    }
  };
  for (const step of view.steps) one(step, false);
  for (const step of view.frame.playing) one(step, true);
  pen.globalAlpha = 1;
  for (const pass of passes.values()) bow(pass, box);
}

function bar(left, y, right, h, step, running) {
  const gap = right - left > 3 ? 1 : right - left > 1.5 ? 0.4 : 0, width = Math.max(right - left - gap, 0.8), round = Math.min(5, width / 2, h / 2);
  const part = (colour, top, height, strength) => {
    pen.globalAlpha = strength;
    pen.fillStyle = colour;
    pen.beginPath();
    pen.roundRect(left, top + 1, width, height - 2, running ? [round, 0, 0, round] : round);
    pen.fill();
  };
  const loud = 0.5 + 0.5 * Math.min(1, Math.log2(1 + step[6]) / 5);
  if (step[5] && step[6]) {
    part(ink.prefill, y, 0.7 * h, 0.9);
    part(ink.decode, y + 0.7 * h, 0.3 * h, loud);
  } else if (step[5]) part(ink.prefill, y, h, 0.9);
  else part(ink.decode, y, h, loud);
}

/** Over the steps of one prompt's pass, with its size. */
function bow(pass, box) {
  const width = pass.right - pass.left, text = number(pass.tokens), middle = (Math.max(pass.left, box.left) + pass.right) / 2;
  pen.strokeStyle = pen.fillStyle = ink.prefill;
  pen.font = `italic 13px ${ink.serif}`;
  pen.textAlign = "center";
  const room = pen.measureText(text).width + 10;
  if (pass.steps > 1 && width > 14) {
    const lift = Math.min(11, 4 + width / 18), y = box.staff.y - 4;
    pen.lineWidth = 1.4;
    pen.beginPath();
    pen.moveTo(pass.left + 2, y);
    pen.bezierCurveTo(pass.left + width * 0.2, y - lift, pass.right - width * 0.2, y - lift, pass.right - 2, y);
    pen.stroke();
    if (width > room) pen.fillText(text, middle, y - lift - 3);
  } else if (width > room && !pass.mixed) pen.fillText(text, middle, box.staff.y - 8);
}

function rows(box, now, x) {
  const most = Math.max(4, ...view.samples.map((s) => s.running + s.waiting));
  const area = (row, value, strength) => {
    const shown = view.samples;
    if (!shown.length) return;
    pen.beginPath();
    pen.moveTo(x(shown[0].at), row.y + row.h);
    let y = row.y + row.h;
    for (const sample of shown) {
      const place = x(sample.at);
      pen.lineTo(place, y);
      y = row.y + row.h - row.h * Math.min(1, value(sample));
      pen.lineTo(place, y);
    }
    pen.lineTo(x(now), y);
    pen.lineTo(x(now), row.y + row.h);
    pen.globalAlpha = strength;
    pen.fillStyle = ink.ink;
    pen.fill();
    pen.globalAlpha = 1;
  };
  area(box.requests, (s) => (s.running + s.waiting) / most, 0.16);
  area(box.requests, (s) => s.running / most, 0.4);
  area(box.kv, (s) => s.used + s.cached, 0.16);
  area(box.kv, (s) => s.used, 0.4);
}

function edges(box, span) {
  const name = (text, y, colour, font) => {
    pen.fillStyle = colour;
    pen.font = font;
    pen.fillText(text, 0, y);
  };
  const serif = `italic ${box.narrow ? 15 : 17}px ${ink.serif}`, sans = `12px ${ink.sans}`;
  pen.textAlign = "left";
  const roles = view.frame?.about.roles || [];
  if (roles.length === 1) {
    name("prefill", box.staff.y + box.staff.h / 2 - 4, ink.prefill, serif);
    name("decode", box.staff.y + box.staff.h / 2 + 18, ink.decode, serif);
  } else {
    name("prefill", box.staff.y + box.staff.h * 0.25 + 5, ink.prefill, serif);
    name("decode", box.staff.y + box.staff.h * 0.75 + 5, ink.decode, serif);
  }
  name("requests", box.requests.y + box.requests.h - 3, ink.faint, sans);
  name("KV cache", box.kv.y + box.kv.h - 3, ink.faint, sans);
  const last = view.samples.at(-1);
  if (last) {
    name(number(last.running + last.waiting), box.requests.y + box.requests.h - 19, ink.ink, sans);
    name(percent(last.used), box.kv.y + box.kv.h - 19, ink.ink, sans);
  }
  pen.strokeStyle = ink.faint;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(box.left - 0.5, box.staff.y);
  pen.lineTo(box.left - 0.5, box.staff.y + box.staff.h);
  pen.moveTo(box.right + 1.5, box.staff.y);
  pen.lineTo(box.right + 1.5, box.staff.y + box.staff.h);
  pen.stroke();
  pen.fillStyle = ink.faint;
  pen.fillRect(box.right + 4, box.staff.y, 3, box.staff.h);
  pen.font = sans;
  const y = box.kv.y + box.kv.h + 15;
  for (const share of box.narrow ? [0, 0.5] : [0, 0.25, 0.5, 0.75]) pen.fillText(`${Math.round(span * (1 - share) * 10) / 10} s ago`, box.left + (box.right - box.left) * share, y);
  pen.textAlign = "right";
  pen.fillText("now", box.right + 7, y);
}

canvas.addEventListener("pointermove", (event) => {
  const shown = view.shown;
  if (!shown || !view.frame) return;
  const at = shown.now - (shown.box.right - event.offsetX) / shown.scale;
  const hit = view.steps.findLast?.((s) => {
    const [y, h] = place(s, shown.box);
    return s[2] <= at && at < s[3] && y <= event.offsetY && event.offsetY < y + h;
  });
  put("pointed", hit ? `${[hit[5] && `prefill of ${number(hit[5])} tokens`, hit[6] && `decode of ${hit[6]}`].filter(Boolean).join(" with ")}, ${hit[4]} ${unitWord()}, ${words(hit[3] - hit[2])}` : "");
});
canvas.addEventListener("pointerleave", () => put("pointed", ""));

let drawnAt = 0;
function turn(at) {
  if (!still.matches && view.paused === null && at - drawnAt > 30) {
    drawnAt = at;
    draw();
  }
  requestAnimationFrame(turn);
}
$("pause").addEventListener("click", () => {
  view.paused = view.paused === null ? performance.now() / 1000 + view.skew : null;
  $("pause").setAttribute("aria-pressed", String(view.paused !== null));
  $("pause").textContent = view.paused === null ? "Pause" : "Go on";
  draw();
});
$("span").addEventListener("change", draw);

// ---------------------------------------------------------------- chat

const chat = { messages: [], running: null };
function say(kind, text) {
  const line = Object.assign(document.createElement("p"), { className: kind, textContent: text });
  $("talk").append(line);
  $("talk").scrollTop = $("talk").scrollHeight;
  return line;
}
function busy(running) {
  chat.running = running;
  $("send").textContent = running ? "Stop" : "Send";
  $("send").classList.toggle("stop", Boolean(running));
  $("talk").setAttribute("aria-busy", String(Boolean(running)));
}

async function converse(text) {
  const control = new AbortController(), messages = [...chat.messages, { role: "user", content: text }];
  busy(control);
  say("user", text);
  const thoughts = say("thoughts", ""), line = say("model", ""), told = say("told", "…");
  const begun = performance.now();
  let answer = "", first = 0, last = 0, tokens = 0, usage = null, end = "";
  const facts = () => [first && `first token ${words((first - begun) / 1000)}`, tokens > 1 && last > first && `${few((1000 * (tokens - 1)) / (last - first))} tokens/s`, tokens && `${number(tokens)} tokens`, end].filter(Boolean).join(" · ");
  try {
    const body = { messages, stream: true, stream_options: { include_usage: true }, max_tokens: Number($("most").value) || 256, temperature: Number($("temperature").value) };
    for await (const data of eventsOf(await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: control.signal }))) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(chunk.error.code, chunk.error.message);
      usage = chunk.usage || usage;
      const choice = chunk.choices[0], part = choice?.delta?.content, thought = choice?.delta?.reasoning_content;
      if (choice?.finish_reason === "length") end = "cut at the limit";
      if (!part && !thought) continue;
      last = performance.now();
      first ||= last;
      tokens++;
      const follow = $("talk").scrollTop + $("talk").clientHeight > $("talk").scrollHeight - 40;
      answer += part || "";
      thoughts.textContent += thought || "";
      line.textContent = answer;
      told.textContent = facts();
      if (follow) $("talk").scrollTop = $("talk").scrollHeight;
    }
    tokens = usage?.completion_tokens ?? tokens;
  } catch (error) {
    if (control.signal.aborted) end = "stopped";
    else {
      end = error.message;
      told.classList.add("error");
      if (error.status === 401) unlock();
    }
  }
  told.textContent = facts() || "no answer";
  $("talk").scrollTop = $("talk").scrollHeight;
  if (answer) chat.messages = [...messages, { role: "assistant", content: answer }];
  busy(null);
}
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.running) return chat.running.abort();
  const text = $("ask").value.trim();
  if (!text) return;
  $("ask").value = "";
  converse(text);
});
$("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!chat.running) $("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.running) chat.running.abort();
  if (event.key === "/" && !/TEXTAREA|INPUT|SELECT/.test(document.activeElement.tagName)) {
    event.preventDefault();
    $("ask").focus();
  }
});
$("fresh").addEventListener("click", () => {
  chat.running?.abort();
  chat.messages = [];
  $("talk").querySelectorAll("p:not(.hint)").forEach((line) => line.remove());
  $("ask").focus();
});

// ---------------------------------------------------------------- both voices

const THEMES = ["Tell a long story about a lighthouse.", "Explain how bread is made.", "Describe a city on a river."];
const SYLLABLES = ["ba", "lo", "ri", "men", "tu", "so", "ka", "vel", "dor", "in"];
const word = () => Array.from({ length: 2 + Math.floor(Math.random() * 2) }, () => SYLLABLES[Math.floor(Math.random() * SYLLABLES.length)]).join("");
let playing = null;
async function play() {
  const control = new AbortController(), { signal } = control;
  playing = control;
  $("play").textContent = "Stop playing";
  $("play").classList.add("on");
  const whole = async (path, body) => (await ask(path, { method: "POST", body: JSON.stringify(body), signal })).text();
  const after = (seconds, work) => new Promise((go) => setTimeout(go, 1000 * seconds)).then(() => !signal.aborted && work());
  const size = Math.min(unitWord() === "SMs" ? 5000 : 500, Math.floor((view.frame?.about.context_tokens || 1000) / 12)); // words, of some tokens each
  const read = () => whole("v1/completions", { prompt: Array.from({ length: size }, word).join(" "), max_tokens: 4 });
  const reading = Promise.allSettled([after(2, read), after(5, read)]);
  let over = false;
  reading.then(() => { over = true; });
  const write = async (content) => {
    do await whole("v1/chat/completions", { messages: [{ role: "user", content }], max_tokens: 160, stream: true });
    while (!over && !signal.aborted);
  };
  const writing = Promise.allSettled(THEMES.map((content, i) => after(0.4 * i, () => write(content))));
  const failed = [...await writing, ...await reading].find((job) => job.status === "rejected" && !signal.aborted);
  if (failed) say("told error", failed.reason.message);
  playing = null;
  $("play").textContent = "Let both play";
  $("play").classList.remove("on");
}
$("play").addEventListener("click", () => (playing ? playing.abort() : play()));

colours();
if (innerWidth < 640) $("span").value = "6";
requestAnimationFrame(turn);
watch();
