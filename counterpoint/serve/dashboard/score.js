// Draws the lanes' steps, the requests and the KV cache of `view` (page.js) on a canvas.

const canvas = $("strip"), pen = canvas.getContext("2d");
let ink = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "card", "ink", "faint", "line", "prefill", "decode", "serif", "sans"]) ink[name] = style.getPropertyValue(`--${name}`).trim();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); draw(); });
new ResizeObserver(() => draw()).observe(canvas);

/** Positions in CSS pixels: the lanes, then the rows of requests and KV cache. */
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
  const now = (view.paused ?? (reducedMotion.matches && view.frame ? view.frame.now_s : clock)) - DELAY_S;
  const scale = (box.right - box.left) / span, x = (at) => box.right - (now - at) * scale;
  view.shown = { box, now, scale };
  drawGrid(box, now, span, x);
  pen.save();
  pen.beginPath();
  pen.rect(box.left, 0, box.right - box.left, box.height);
  pen.clip();
  if (view.frame) drawSteps(box, now, span, x);
  if (view.frame?.state === "ready" && !view.frame.playing.length && !(view.newest > now - span)) drawIdle(box);
  drawLoad(box, now, x);
  pen.restore();
  drawLabels(box, span);
}

function drawGrid(box, now, span, x) {
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

/** Text in place of steps when nothing runs. */
function drawIdle(box) {
  const text = "Both lanes are idle.", middle = (box.left + box.right) / 2, y = box.staff.y + box.staff.h / 2;
  pen.font = `italic 17px ${ink.serif}`;
  const half = pen.measureText(text).width / 2 + 12;
  pen.fillStyle = ink.card;
  pen.fillRect(middle - half, y - 12, 2 * half, 24);
  pen.fillStyle = ink.faint;
  pen.textAlign = "center";
  pen.fillText(text, middle, y + 6);
}

/** [y, height] of a step: prefill uses the low units (top), decode the high ones. Each worker of a pool has a band. */
function stepBox(step, box) {
  const about = view.frame.about, units = about.units || 1, [first, count] = about.bands[step[0]] ?? [0, units];
  const unit = box.staff.h / units, h = unit * Math.min(step[4], count), top = box.staff.y + unit * first;
  return [about.roles[step[0]] === "decode" ? top + unit * count - h : top, h];
}

function drawSteps(box, now, span, x) {
  const passes = new Map(), drawn = new Map(), from = now - span;
  let batch = 0, told = -1e9;
  const one = (step, running) => {
    const end = running ? now : Math.min(step[3], now);
    if (end < from || step[2] >= now) return;
    const [y, h] = stepBox(step, box), left = x(step[2]), right = Math.max(x(end), left + 1);
    if (step[5]) {
      const pass = passes.get(step[1]);
      if (pass) { pass.right = right; pass.steps++; } else passes.set(step[1], { left, right, y, h, steps: 1, tokens: step[5], mixed: step[6], running });
    }
    const drawnTo = drawn.get(step[0]) ?? -1e9;
    if (right - drawnTo < 0.75) return;
    drawn.set(step[0], right);
    drawBar(Math.max(left, drawnTo > left + 1 ? drawnTo : left), y, right, h, step, running);
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
  if (!view.frame.about.bands.length) for (const pass of passes.values()) drawPassArc(pass, box);
}

function drawBar(left, y, right, h, step, running) {
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

/** An arc over the steps of one prefill pass, with its token count. */
function drawPassArc(pass, box) {
  const width = pass.right - pass.left, text = formatCount(pass.tokens), middle = (Math.max(pass.left, box.left) + pass.right) / 2;
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

function drawLoad(box, now, x) {
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

function drawLabels(box, span) {
  const name = (text, y, colour, font) => {
    pen.fillStyle = colour;
    pen.font = font;
    pen.fillText(text, 0, y);
  };
  const serif = `italic ${box.narrow ? 15 : 17}px ${ink.serif}`, sans = `12px ${ink.sans}`;
  pen.textAlign = "left";
  const roles = view.frame?.about.roles || [];
  if (view.frame?.workers.length) drawWorkerBands(box, name, serif);
  else if (roles.length === 1) {
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
    name(formatCount(last.running + last.waiting), box.requests.y + box.requests.h - 19, ink.ink, sans);
    name(formatPercent(last.used), box.kv.y + box.kv.h - 19, ink.ink, sans);
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

/** Names of a pool's workers and the lines between their bands. */
function drawWorkerBands(box, name, serif) {
  const about = view.frame.about, unit = box.staff.h / (about.units || 1);
  view.frame.workers.forEach((worker, i) => {
    const [first, count] = about.bands[2 * i] ?? [0, 1], top = box.staff.y + unit * first;
    name(worker.name, top + (unit * count) / 2 + 5, worker.up ? ink[worker.role] || ink.ink : ink.faint, serif.replace(/1[57]px/, "14px"));
    pen.strokeStyle = ink.faint;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(box.left, Math.round(top) + 0.5);
    pen.lineTo(box.right, Math.round(top) + 0.5);
    pen.stroke();
  });
}

canvas.addEventListener("pointermove", (event) => {
  const shown = view.shown;
  if (!shown || !view.frame) return;
  const at = shown.now - (shown.box.right - event.offsetX) / shown.scale;
  const hit = view.steps.findLast?.((s) => {
    const [y, h] = stepBox(s, shown.box);
    return s[2] <= at && at < s[3] && y <= event.offsetY && event.offsetY < y + h;
  });
  putText("pointed", hit ? `${[hit[5] && `prefill of ${formatCount(hit[5])} tokens`, hit[6] && `decode of ${hit[6]}`].filter(Boolean).join(" with ")}, ${hit[4]} ${unitWord()}, ${formatSeconds(hit[3] - hit[2])}` : "");
});
canvas.addEventListener("pointerleave", () => putText("pointed", ""));

let drawnAt = 0;
function animate(at) {
  if (!reducedMotion.matches && view.paused === null && at - drawnAt > 30) {
    drawnAt = at;
    draw();
  }
  requestAnimationFrame(animate);
}
$("pause").addEventListener("click", () => {
  view.paused = view.paused === null ? performance.now() / 1000 + view.skew : null;
  $("pause").setAttribute("aria-pressed", String(view.paused !== null));
  $("pause").textContent = view.paused === null ? "Pause" : "Go on";
  draw();
});
$("span").addEventListener("change", draw);
