// A chat over /v1/chat/completions, and a button that loads prefill and decode together.

const chat = { messages: [], running: null };
function addLine(kind, text) {
  const line = Object.assign(document.createElement("p"), { className: kind, textContent: text });
  $("talk").append(line);
  $("talk").scrollTop = $("talk").scrollHeight;
  return line;
}
function setRunning(running) {
  chat.running = running;
  $("send").textContent = running ? "Stop" : "Send";
  $("send").classList.toggle("stop", Boolean(running));
  $("talk").setAttribute("aria-busy", String(Boolean(running)));
}

async function sendMessage(text) {
  const control = new AbortController(), messages = [...chat.messages, { role: "user", content: text }];
  setRunning(control);
  addLine("user", text);
  const thoughts = addLine("thoughts", ""), line = addLine("model", ""), told = addLine("told", "…");
  const begun = performance.now();
  let answer = "", first = 0, last = 0, tokens = 0, usage = null, end = "";
  const facts = () => [first && `first token ${formatSeconds((first - begun) / 1000)}`, tokens > 1 && last > first && `${formatRate((1000 * (tokens - 1)) / (last - first))} tokens/s`, tokens && `${formatCount(tokens)} tokens`, end].filter(Boolean).join(" · ");
  try {
    const body = { messages, stream: true, stream_options: { include_usage: true }, max_tokens: Number($("most").value) || 256, temperature: Number($("temperature").value) };
    for await (const data of readEvents(await request("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: control.signal }))) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new HttpError(chunk.error.code, chunk.error.message);
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
      if (error.status === 401) askForKey();
    }
  }
  told.textContent = facts() || "no answer";
  $("talk").scrollTop = $("talk").scrollHeight;
  if (answer) chat.messages = [...messages, { role: "assistant", content: answer }];
  setRunning(null);
}
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.running) return chat.running.abort();
  const text = $("ask").value.trim();
  if (!text) return;
  $("ask").value = "";
  sendMessage(text);
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

// ---------------------------------------------------------------- load of both phases

const THEMES = ["Tell a long story about a lighthouse.", "Explain how bread is made.", "Describe a city on a river."];
const SYLLABLES = ["ba", "lo", "ri", "men", "tu", "so", "ka", "vel", "dor", "in"];
const word = () => Array.from({ length: 2 + Math.floor(Math.random() * 2) }, () => SYLLABLES[Math.floor(Math.random() * SYLLABLES.length)]).join("");
let playing = null;
async function play() {
  const control = new AbortController(), { signal } = control;
  playing = control;
  $("play").textContent = "Stop";
  $("play").classList.add("on");
  const whole = async (path, body) => (await request(path, { method: "POST", body: JSON.stringify(body), signal })).text();
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
  if (failed) addLine("told error", failed.reason.message);
  playing = null;
  $("play").textContent = "Run both phases";
  $("play").classList.remove("on");
}
$("play").addEventListener("click", () => (playing ? playing.abort() : play()));
