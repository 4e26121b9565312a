// The page: conversation, settings, the machine's limit. stream.js measures, markdown.js draws.

import { make, Markdown } from "./markdown.js";
import { account, ask, chatStream, Meter, Painter, format } from "./stream.js";

const $ = (id) => document.getElementById(id);
const on = (id, event, act) => $(id).addEventListener(event, act);
const load = (name, otherwise) => JSON.parse(localStorage.getItem(`laneformer.${name}`)) ?? otherwise;
const store = (name, value) => localStorage.setItem(`laneformer.${name}`, JSON.stringify(value));
const MOST_CHATS = 100;
const BUSY = 0.8;  // share of the processors' time, below which the page says why it is slow
const SPEED_EVERY_MS = 100;  // figures that change faster cannot be read
const SETTINGS = [  // name in the request, label, what it does, least, most, step, default where the model has no say
  ["temperature", "Temperature", "0 always takes the likeliest token", 0, 10, "any", 0],
  ["top_p", "Top-p", "from the fewest tokens that reach this probability", 0.01, 1, "any", 1],
  ["top_k", "Top-k", "from this many likeliest; 0 is off", 0, 1e6, 1, 0],
  ["min_p", "Min-p", "at least this share of the likeliest’s probability", 0, 1, "any", 0],
  ["repetition_penalty", "Repetition penalty", "divides the logits of tokens seen so far", 0.01, 10, "any", 1],
  ["frequency_penalty", "Frequency penalty", "for each time a token was written", -2, 2, "any", 0],
  ["presence_penalty", "Presence penalty", "for tokens that were written", -2, 2, "any", 0],
  ["max_completion_tokens", "Most tokens", "of an answer", 1, 1e6, 1, "no limit"],
  ["seed", "Seed", "the same seed, the same answer", 0, 2 ** 53 - 1, 1, "random"],
  ["speculate", "Draft tokens", "most of a pass, guessed from earlier text: the same answer, sooner; 0 is off", 0, 31, 1, 31],
];
const STARTERS = [
  "Explain to a ten-year-old why the sky is blue.",
  "Write a Python function that merges two sorted lists, with a short test.",
  "Compare TCP and UDP in a table of three rows.",
  "Write four lines about the sea at night.",
];
const machine = { id: "", sampling_defaults: {}, limit_tokens_per_s: null };  // what the server says in /props
const settings = load("settings", {});  // only what the user has set
let messages = load("chat", []), running = null;  // running: the AbortController of what streams
let earlier = load("chats", []);  // conversations that were left, each its messages, the newest first

// --- the conversation ------------------------------------------------------------------------------------------------

/** A request with the user's settings. The seed is drawn here where none is set, so that an answer can be repeated. */
function requestFor(conversation) {
  const { system, ...sampling } = settings, seed = crypto.getRandomValues(new Uint32Array(1))[0];
  const spoken = [...(system ? [{ role: "system", content: system }] : []), ...conversation];
  return { model: machine.id, seed, ...sampling, messages: spoken.map(({ role, content }) => ({ role, content })) };
}

function send(text) {
  if (running || !text.trim()) return;
  messages.push({ role: "user", content: text.trim() });
  rewrite(messages.length);
}

/** Forget the messages from this one on, and stream a reply to the one before it. seed: of an answer that comes again. */
async function rewrite(index, seed = null) {
  if (running) return;
  messages.length = index;
  drawAll();
  const conversation = messages, request = { ...requestFor(messages), ...(seed !== null && { seed }) }, message = { role: "assistant", content: "" }, meter = new Meter();
  const turn = drawTurn(message), markdown = new Markdown(turn.firstChild);
  let pending = "", thought = "", speed_shown_ms = 0, failure = null;
  const painter = new Painter(() => {
    const log = $("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    markdown.push(pending);
    if (thought) showThought(turn, thought);
    pending = thought = "";
    if (performance.now() - speed_shown_ms > SPEED_EVERY_MS) drawSpeed(meter.figures()), (speed_shown_ms = performance.now());
    if (follows) log.scrollTop = log.scrollHeight;
  });
  setRunning(new AbortController());
  try {
    for await (const chunk of chatStream(request, running.signal)) {
      meter.add(chunk);
      message.content += chunk.text;
      pending += chunk.text;
      thought += chunk.reasoning;
      if (chunk.reasoning) message.reasoning = (message.reasoning ?? "") + chunk.reasoning;
      painter.soon();
    }
  } catch (error) {
    meter.finish = error.name === "AbortError" ? "cancelled" : "error";
    if (meter.finish === "error") failure = error;
  }
  painter.now();
  markdown.end();
  setRunning(null);
  message.figures = { ...meter.figures(), seed: request.seed };
  if (message.content || message.reasoning) conversation.push(message);
  store("chat", messages), store("chats", earlier);
  if (!turn.isConnected) return;  // the conversation was left
  if (message.content || message.reasoning) finishTurn(turn, message);
  else turn.remove();
  if (!failure) await ask("props").then((answer) => answer.json()).then(({ processor_share }) => (machine.processor_share = processor_share), () => {});
  drawSpeed(message.figures);
  if (failure) showNotice(failure, retry);
  $("said").textContent = failure ? "" : `Answer of ${message.figures.tokens} tokens ended.`;
  $("log").scrollTop = $("log").scrollHeight;
}

function setRunning(controller) {
  running = controller;
  document.body.classList.toggle("running", Boolean(running));
  $("log").setAttribute("aria-busy", String(Boolean(running)));  // a screen reader waits for the whole answer
  $("send").setAttribute("aria-label", running ? "Stop" : "Send");
  $("send").title = running ? "Stop (Esc)" : "Send (Enter)";
}

const retry = () => rewrite(messages.findLastIndex(({ role }) => role === "user") + 1);

function drawAll() {
  store("chat", messages);
  $("empty").hidden = messages.length > 0;
  $("log").hidden = $("speed").hidden = !messages.length;
  drawEarlier();
  $("log").replaceChildren();
  messages.forEach((message) => finishTurn(drawTurn(message), message));
  $("log").scrollTop = $("log").scrollHeight;
}

/** Leave the conversation for a new one, or for one of the earlier ones; it stays among them. */
function leaveFor(chosen = []) {
  running?.abort();
  earlier = [...(messages.length ? [messages] : []), ...earlier.filter((chat) => chat !== chosen)].slice(0, MOST_CHATS);
  messages = chosen;
  store("chats", earlier);
  drawAll();
  $("prompt").focus();
}

/** The earlier conversations, each to open or to delete. */
function drawEarlier() {
  const rows = earlier.map((chat) => {
    const title = chat.find(({ role }) => role === "user")?.content ?? "", row = make("li", { class: "row" });
    const remove = button("Delete", () => replaceEarlier(earlier.filter((other) => other !== chat), title));
    remove.setAttribute("aria-label", `Delete the chat: ${title}`);
    row.append(button(title, () => leaveFor(chat)), remove);
    return row;
  });
  $("earlier").replaceChildren(...rows);
  $("earlier-title").hidden = !rows.length;
}

/** The list without one of them, and a way back until the next change. */
function replaceEarlier(others, title) {
  const before = earlier;
  store("chats", (earlier = others));
  drawEarlier();
  const undo = button("Undo", () => (store("chats", (earlier = before)), drawEarlier()));
  $("earlier").append(make("li", { class: "row quiet", role: "status" }, make("span", {}, `“${title}” is deleted.`), undo));
  undo.focus();
}

function drawTurn({ role, content, reasoning }) {
  const body = make("div", { class: "body" }), ours = role === "user", markdown = new Markdown(body);
  if (ours) body.append(content);
  else markdown.push(content), markdown.end();
  const turn = make("article", { class: role, "aria-label": ours ? "You" : "Model" }, body);
  $("log").append(turn);
  if (reasoning) showThought(turn, reasoning);
  return turn;
}

/** What the model reasons before its answer, folded. */
function showThought(turn, text) {
  const fold = turn.querySelector("details") ?? make("details", {}, make("summary", {}, "Reasoning"), make("p", {}));
  if (!fold.parentNode) turn.prepend(fold);
  fold.lastChild.append(text);
}

/** What can be done with a message, and how fast it came. */
function finishTurn(turn, message) {
  const f = message.figures, again = () => rewrite(messages.indexOf(message));
  const tools = message.role === "user" ? [button("Edit", () => edit(turn, message))] : [button("Copy", ({ target }) => copy(target, message.content)), button("Regenerate", again)];
  const why = { length: " · ended at the limit of tokens", cancelled: " · stopped", error: " · broken off" }[f?.finish_reason] ?? "";
  const drafts = f?.proposed_tokens ? ` · ${f.accepted_tokens} of ${f.proposed_tokens} drafts right` : "";
  const figures = f ? `${f.tokens} tokens · ${format.rate(f.tokens_per_s)} tokens/s · first after ${format.ms(f.ttft_ms)}${drafts}${why} · seed ${f.seed}` : "";
  turn.append(make("footer", {}, ...tools, make("span", { class: "quiet" }, figures)));
}

/** Turn a message of the user into a field; sending it continues the conversation from there. */
function edit(turn, message) {
  if (running) return;
  const field = make("textarea", { rows: 3, "aria-label": "Edit the message" });
  const done = () => field.value.trim() && ((message.content = field.value.trim()), rewrite(messages.indexOf(message) + 1));
  field.value = message.content;
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), done();
    if (event.key === "Escape") drawAll(), $("prompt").focus();
  });
  turn.replaceChildren(field, make("footer", {}, button("Send", done), button("Cancel", drawAll)));
  field.focus();
}

function button(label, act) {
  const element = make("button", { type: "button" }, label);
  element.addEventListener("click", act);
  return element;
}

async function copy(clicked, text) {
  const label = clicked.textContent;  // only pages from localhost or https have a clipboard
  clicked.textContent = await (navigator.clipboard?.writeText(text) ?? Promise.reject()).then(() => "Copied", () => "No clipboard here");
  setTimeout(() => (clicked.textContent = label), 1200);
}

/** What went wrong, in the server's words, with what can be done about it. */
function showNotice({ status, message, retryAfterS }, again) {
  const box = make("div", { class: "notice", role: "alert" }, make("p", {}, message)), act = () => (box.remove(), again());
  const field = make("input", { type: "password", placeholder: "API key", "aria-label": "API key", autocomplete: "off" });
  const form = make("form", { class: "row" }, ...(status === 401 ? [field, make("button", { class: "primary" }, "Use this key")] : [make("button", {}, "Retry")]));
  if (retryAfterS) form.append(make("span", { class: "quiet" }, `The server suggests to wait ${retryAfterS} s.`));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (status === 401) sessionStorage.setItem("laneformer.key", (account.key = field.value.trim())), loadFacts();
    act();
  });
  box.append(form);
  $("empty").hidden = true;
  $("log").hidden = false;
  $("log").append(box);
  $("log").scrollTop = $("log").scrollHeight;
}

// --- speed and settings ----------------------------------------------------------------------------------------------

function drawSpeed({ tokens, tokens_per_s, ttft_ms, gap_p50_ms, gap_p99_ms, cached_tokens, prompt_tokens, accepted_tokens }) {
  if (!tokens) return;  // the last answer's stay until there are new ones
  const limit = machine.limit_tokens_per_s, percent = limit && tokens_per_s ? Math.round((100 * tokens_per_s) / limit) : 0;
  const of = `this machine’s memory limit of ${format.rate(limit)} tokens/s`;
  const texts = { rate: format.rate(tokens_per_s), ttft: format.ms(ttft_ms), p50: format.ms(gap_p50_ms), p99: format.ms(gap_p99_ms), cached: cached_tokens === null ? "–" : `${cached_tokens} of ${prompt_tokens}` };
  for (const [id, text] of Object.entries(texts)) $(id).textContent = text;
  $("gauge").hidden = $("limit").hidden = !limit;
  const share = machine.processor_share;
  if (share < BUSY) $("limit").textContent = `${percent}% of ${of}. Other programs keep this machine busy: the engine had ${Math.round(100 * share)}% of its processors’ time.`;
  else $("limit").textContent = percent > 100 && accepted_tokens ? `${percent}% of ${of}: drafts give several tokens a read` : `${percent}% of ${of}`;
  $("gauge").setAttribute("aria-valuenow", Math.min(100, percent));
  $("gauge").firstChild.style.transform = `scaleX(${Math.min(100, percent) / 100})`;
}

/** What the server runs on. */
async function loadFacts() {
  try {
    Object.assign(machine, await (await ask("props")).json());
  } catch (failure) {
    return showNotice(failure, () => (drawAll(), loadFacts()));
  }
  const { id, threads, isa, dtype, context_tokens, weight_bytes, probe_bytes_per_s: probe, limit_tokens_per_s: limit } = machine;
  const facts = { Model: id, Weights: `${format.bytes(weight_bytes)}, ${dtype}`, Context: `${context_tokens} tokens`, Threads: threads, Instructions: isa, ...(limit && { "Memory reads": `${format.bytes(probe)}/s`, Limit: `${format.rate(limit)} tokens/s` }) };
  $("machine").replaceChildren(...Object.entries(facts).map(([name, fact]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(fact)))));
  $("model").textContent = id;
  const link = machine.link, left = link && Math.round((100 * link.tokens_per_s) / link.tokens_per_s_without);
  $("link").hidden = !link;
  if (link) $("link").textContent = `Lanes hear each other ${link.us} µs late, as over a link: ${left}% of ${format.rate(link.tokens_per_s_without)} tokens/s without it.`;
  drawSettings();
  if (!limit) return;  // a GPU has not been probed: the page works and shows no limit
  $("promise").replaceChildren(make("b", {}, format.rate(limit)), " tokens/s");
  $("promise-why").textContent = `is the limit of this machine: so often a second can its memory deliver the ${format.bytes(weight_bytes)} of ${id}. Ask something, and see how close it comes.`;
}

function drawSettings() {
  const system = make("textarea", { rows: 3, name: "system", placeholder: "none" });
  const rows = SETTINGS.map(([name, label, help, min, max, step, off]) => {
    const placeholder = machine.sampling_defaults[name] ?? off;
    const field = make("input", { type: "number", name, min, max, step, placeholder, "aria-label": label, "aria-describedby": `about-${name}` });
    return make("label", {}, make("span", {}, label, make("small", { id: `about-${name}` }, help)), field);
  });
  $("settings-form").replaceChildren(make("label", { class: "tall" }, "System prompt", system), ...rows);
  for (const field of $("settings-form").elements) field.value = settings[field.name] ?? "";
  $("drafts").setAttribute("aria-checked", String(drafts() > 0));
}

/** Most draft tokens of a pass. */
const drafts = () => settings.speculate ?? machine.sampling_defaults.speculate ?? 31;

/** Drafts on or off. The last answer comes again with its seed: the same text, at another speed. */
async function switchDrafts() {
  const before = messages.at(-1), turn = messages.length - 1;
  if (running) return;
  if (drafts()) settings.speculate = 0;
  else if (delete settings.speculate, !drafts()) settings.speculate = 31;
  store("settings", settings);
  drawSettings();
  if (!before?.figures) return;
  $("compared").textContent = "The last answer comes again …";
  await rewrite(turn, before.figures.seed);
  if (messages[turn]) showComparison(before, messages[turn]);
}

function showComparison(before, after) {
  const [on, off] = (drafts() ? [after, before] : [before, after]).map(({ figures }) => figures.tokens_per_s), ratio = on / off;
  const verdict = Math.abs(ratio - 1) < 0.02 ? "as fast" : `${Math.max(ratio, 1 / ratio).toFixed(2)}× as ${ratio > 1 ? "fast" : "slow"}`;
  const same = before.content === after.content ? "the same answer" : "another answer";
  $("compared").textContent = on && off ? `${format.rate(on)} tokens/s with, ${format.rate(off)} without: ${verdict}, ${same}.` : "The answer is too short to compare.";
}

function showSettings(open) {
  $("settings").hidden = !open;
  $("open-settings").setAttribute("aria-expanded", String(open));
  (open ? $("close-settings") : $("open-settings")).focus();
}

// --- keys and buttons ------------------------------------------------------------------------------------------------

on("composer", "submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  send($("prompt").value);
  $("prompt").value = "";
});
on("prompt", "keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), running || $("composer").requestSubmit();
  if (event.key === "ArrowUp" && !event.target.value) event.preventDefault(), [...document.querySelectorAll("article.user button")].at(-1)?.click();
});
on("settings-form", "input", ({ target }) => {
  if (target.value === "") delete settings[target.name];
  else if (target.validity.valid) settings[target.name] = target.valueAsNumber ?? target.value;
  store("settings", settings);
  $("drafts").setAttribute("aria-checked", String(drafts() > 0));
});
on("reset", "click", () => {
  for (const name of Object.keys(settings)) delete settings[name];
  store("settings", settings);
  drawSettings();
});
on("log", "click", ({ target }) => target.matches(".copy") && copy(target, target.closest("figure").querySelector("code").textContent));
on("drafts", "click", switchDrafts);
on("new", "click", () => leaveFor());
on("export", "click", () => {
  const text = JSON.stringify({ exported: new Date().toISOString(), machine, settings, messages }, null, 2);
  const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href, download: "laneformer-chat.json" }).click();
});
on("open-settings", "click", () => showSettings($("settings").hidden));
on("close-settings", "click", () => showSettings(false));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
  else if (event.key === "Escape" && !$("settings").hidden) showSettings(false);
  if (event.key === "/" && !event.target.matches("input, textarea, select")) event.preventDefault(), $("prompt").focus();
});

$("starters").append(...STARTERS.map((text) => make("li", {}, button(text, () => send(text)))));
drawAll();
drawSettings();
loadFacts();
$("prompt").focus();
