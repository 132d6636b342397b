"use strict";
// One conversation with several models: every question goes to all of them, each keeps its own answers.
const data = JSON.parse(document.getElementById("run-data").textContent);
const models = data.models;
const chats = models.map(() => []);
const asked = [];
let generation = 0; // of chats: what an older one still brings is dropped
let running = [];
let recalled = 0;

function make(tag, className, text) {
  const found = document.createElement(tag);
  if (className) found.className = className;
  if (text !== undefined) found.textContent = text;
  return found;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${count < 10 && unit ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

function count(number) {
  for (const [unit, scale] of [["B", 1e9], ["M", 1e6], ["k", 1e3]])
    if (number >= scale) return `${Number((number / scale).toPrecision(3))}${unit}`;
  return String(number);
}

const main = document.querySelector("main");
main.style.setProperty("--count", models.length);

const header = make("header", models.length > 2 ? "many" : ""); // a phone has room for their names
const cards = header.appendChild(make("div", "wide columns"));
models.forEach((model, number) => {
  const card = cards.appendChild(make("div", `model c${number % 4}`));
  card.appendChild(make("h2", "", model.shown)).title = model.name;
  const shape = `${count(model.parameters)} parameters · ${bytes(model.size_bytes)} on disk · ${model.runtime}`;
  card.appendChild(make("p", "", shape));
  if (!model.is_chat) card.appendChild(make("p", "", "no chat template: continues your text"));
});

const log = make("div", "log");
log.tabIndex = 0;
log.setAttribute("role", "log");
log.setAttribute("aria-label", "conversation");
const inner = log.appendChild(make("div", "wide"));

const footer = make("footer");
const foot = footer.appendChild(make("div", "wide"));
const form = foot.appendChild(make("form", "compose"));
const field = form.appendChild(make("textarea"));
field.rows = 1;
field.placeholder = models.length > 1 ? "Ask all of them" : "Ask";
field.setAttribute("aria-label", "your message");
const button = form.appendChild(make("button", "main", "Send"));
button.type = "submit";
const under = foot.appendChild(make("div", "under"));
const fresh = under.appendChild(make("button", "", "New chat"));
const tune = under.appendChild(make("button", "", "Settings"));
const save = under.appendChild(make("button", "", "Save"));
const keys = under.appendChild(make("span", "keys"));
for (const [key, meaning] of [["Enter", "send"], ["Shift+Enter", "new line"], ["Esc", "stop"], ["↑", "last message"], ["Alt+N", "new chat"]]) {
  keys.appendChild(make("kbd", "", key));
  keys.append(` ${meaning}  `);
}
const state = under.appendChild(make("span", "state"));
state.setAttribute("role", "status");

const panel = foot.appendChild(make("div", "settings"));
panel.hidden = true;
panel.id = "settings";
tune.setAttribute("aria-controls", "settings");
tune.setAttribute("aria-expanded", "false");
const inputs = {};
function setting(name, label, value, options) {
  const wrap = panel.appendChild(make("label", "", label));
  const input = wrap.appendChild(make("input"));
  Object.assign(input, { type: "number", ...options, value: value ?? "" });
  input.dataset.name = name;
  inputs[name] = input;
}
setting("system", "system prompt (starts a new chat)", data.system, { type: "text" });
setting("temperature", "temperature, 0: greedy", data.settings.temperature, { min: 0, step: "any" });
setting("top_p", "top-p", data.settings.top_p, { min: 0, max: 1, step: "any" });
setting("top_k", "top-k, 0: all", data.settings.top_k, { min: 0, step: 1 });
setting("tokens", "tokens at most", data.settings.tokens, { min: 1, step: 1 });
setting("seed", "seed", data.settings.seed, { min: 0, step: 1 });
main.replaceChildren(header, log, footer);

function settings() {
  const found = {};
  for (const name of ["temperature", "top_p", "top_k", "tokens", "seed"])
    if (inputs[name].value !== "") found[name] = Number(inputs[name].value);
  return found;
}

function reset(focus = true) {
  stop();
  generation += 1;
  running = [];
  chats.forEach((chat) => chat.splice(0));
  if (inputs.system.value.trim())
    chats.forEach((chat) => chat.push({ role: "system", content: inputs.system.value.trim() }));
  const empty = make("div", "empty");
  empty.appendChild(make("h1", "", models.length > 1 ? "One question, every answer" : "Ask something"));
  empty.appendChild(make("p", "", models.length > 1
    ? "All models get the same message and answer side by side. Nothing leaves this machine."
    : "Nothing leaves this machine."));
  inner.replaceChildren(empty);
  state.textContent = "";
  show();
  if (focus) field.focus();
}

function stop() {
  running.forEach((one) => one.abort());
}

function grow() {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

function show() {
  const busy = running.length > 0;
  button.textContent = busy ? "Stop" : "Send";
  button.classList.toggle("stop", busy);
  button.disabled = !busy && !field.value.trim();
}

function atEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function stats(model, found) {
  const speed = found.seconds > 0 ? found.tokens / found.seconds : 0;
  const size = `${bytes(model.size_bytes)} on disk`;
  const cut = found.last && !found.finished ? " · cut at the maximum" : "";
  return `${speed.toFixed(1)} tokens/s · ${found.tokens} tokens · ${bytes(found.memory)} memory (${model.memory_is}) · ${size}${cut}`;
}

async function* lines(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += decoder.decode(value ?? new Uint8Array(), { stream: !done });
    const parts = rest.split("\n");
    rest = parts.pop();
    for (const part of parts) if (part) yield JSON.parse(part);
    if (done) return;
  }
}

const pause = (seconds, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, seconds * 1000);
  signal.addEventListener("abort", () => { clearTimeout(timer); reject(new DOMException("", "AbortError")); });
});

async function request(number, signal, note) {
  const body = JSON.stringify({ model: number, messages: chats[number], settings: settings() });
  for (;;) {
    const response = await fetch("/answer", { method: "POST", headers: { "Content-Type": "application/json" }, body, signal });
    if (response.status !== 503) return response;
    const wait = Number(response.headers.get("Retry-After")) || 5;
    note(`busy: asking again in ${wait} s`);
    await pause(wait, signal);
  }
}

async function answer(number, cell) {
  const text = cell.querySelector(".text");
  const below = cell.querySelector(".stats");
  const control = new AbortController();
  const own = generation;
  running.push(control);
  cell.classList.add("running");
  let whole = "";
  let ended = false;
  try {
    const response = await request(number, control.signal, (line) => { below.textContent = line; });
    if (!response.ok) throw new Error((await response.json()).error);
    for await (const found of lines(response)) {
      if (found.error) throw new Error(found.error);
      const follow = atEnd();
      whole += found.text;
      text.textContent = whole;
      below.textContent = stats(models[number], found);
      if (follow) log.scrollTop = log.scrollHeight;
    }
    ended = true;
  } catch (error) {
    if (error.name === "AbortError") below.textContent = [below.textContent, "stopped"].filter(Boolean).join(" · ");
    else {
      cell.classList.add("error");
      text.textContent = [whole, error.message || "the server does not answer"].filter(Boolean).join("\n");
    }
  }
  if (own !== generation) return false;
  if (ended || whole) chats[number].push({ role: "assistant", content: whole });
  else chats[number].pop(); // a question without an answer is no part of a chat
  cell.classList.remove("running");
  running = running.filter((one) => one !== control);
  show();
  return ended;
}

async function ask(question) {
  inner.querySelector(".empty")?.remove();
  const turn = inner.appendChild(make("section", "turn"));
  turn.appendChild(make("p", "asked", question));
  const row = turn.appendChild(make("div", "columns"));
  const cells = models.map((model, number) => {
    const cell = row.appendChild(make("div", `said c${number % 4}`));
    cell.dataset.model = number;
    cell.appendChild(make("div", "who", model.shown));
    cell.appendChild(make("p", "text", ""));
    cell.appendChild(make("p", "stats", ""));
    return cell;
  });
  log.scrollTop = log.scrollHeight;
  asked.push(question);
  recalled = asked.length;
  chats.forEach((chat) => chat.push({ role: "user", content: question }));
  const all = cells.map((cell, number) => answer(number, cell));
  show();
  const own = generation;
  const ended = await Promise.all(all);
  if (own === generation && ended.some(Boolean)) state.textContent = "answered";
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running.length) { stop(); return; }
  const question = field.value.trim();
  if (!question) return;
  field.value = "";
  state.textContent = "";
  grow();
  ask(question);
});

field.addEventListener("input", () => { grow(); show(); });
field.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running.length) form.requestSubmit();
  } else if (event.key === "ArrowUp" && (field.value === "" || field.value === asked[recalled]) && recalled > 0) {
    event.preventDefault();
    recalled -= 1;
    field.value = asked[recalled];
    grow();
    show();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { stop(); field.focus(); }
  if (event.altKey && event.key.toLowerCase() === "n") { event.preventDefault(); reset(); }
  if (event.key === "/" && document.activeElement === document.body) { event.preventDefault(); field.focus(); }
});

fresh.addEventListener("click", () => reset());
inputs.system.addEventListener("change", () => reset(false)); // which leaves Tab its way to the next setting
tune.addEventListener("click", () => {
  panel.hidden = !panel.hidden;
  tune.setAttribute("aria-expanded", String(!panel.hidden));
});
// conversations up to their last answer: a question that is not answered yet is no part of one
function saved() {
  const ends = chats.map((chat) => chat.findLastIndex((message) => message.role === "assistant") + 1);
  const rows = models.map((model, number) => ({ id: model.name, messages: chats[number].slice(0, ends[number]) }));
  return rows.filter((row) => row.messages.length).map((row) => JSON.stringify(row));
}
save.addEventListener("click", () => {
  const rows = saved();
  if (!rows.length) { state.textContent = "nothing to save yet"; return; }
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([`${rows.join("\n")}\n`], { type: "application/x-ndjson" }));
  link.download = "chat.jsonl";
  link.click();
  URL.revokeObjectURL(link.href);
});
addEventListener("pagehide", stop);
reset();
show();
