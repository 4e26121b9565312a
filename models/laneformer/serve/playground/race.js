// The same prompt twice, with two settings. Measured one after the other, so that neither slows the other; what is then
// replayed side by side are the recorded arrivals, at the speed at which they came.

import { make, Markdown } from "./markdown.js";
import { chatStream, Meter, Painter, shown } from "./stream.js";

const HOW = {
  apart: "A runs alone, then B: neither slows the other. Then both recordings play together, at the speed they had. The prompt is read once before, so both start from a cached prompt, with the same seed.",
  together: "Both run at the same time and share the machine, so each is slower than alone. They have the same seed.",
};
const $ = (id) => document.getElementById(id);
const say = (text) => ($("verdict").textContent = text);

/** One of the two: its settings, its recording and its part of the page. */
class Lane {
  constructor(name, speculate) {
    const input = (label, attributes) => make("label", {}, label, make("input", { type: "number", min: 0, ...attributes }));
    const fields = [input("Draft tokens", { name: "speculate", max: 31, value: speculate }), input("Temperature", { name: "temperature", max: 10, step: "any", placeholder: "default" })];
    Object.assign(this, { name, fields: fields.map((label) => label.lastChild), rate: make("output", {}, "–"), bar: make("i"), state: make("p", { class: "quiet" }, "ready") });
    this.body = make("div", { class: "body", tabindex: "0", role: "region", "aria-label": `Answer of ${name}` });
    this.element = make("section", { class: "lane", "aria-label": `Lane ${name}` }, make("div", { class: "row" }, make("h2", {}, name), ...fields),
      make("p", { class: "pace" }, this.rate, make("span", {}, " tokens/s")), make("div", { class: "gauge" }, this.bar), this.state, this.body);
  }

  clear() {
    this.body.replaceChildren();
    this.element.classList.remove("ahead");
    Object.assign(this, { markdown: new Markdown(this.body), seen: new Meter(), played: 0 });
  }

  async run(base, signal) {
    this.clear();
    Object.assign(this, { chunks: [], start_ms: performance.now(), most: base.max_completion_tokens });
    this.state.textContent = "running";
    const own = this.fields.filter((field) => field.value).map((field) => [field.name, field.valueAsNumber]);
    const painter = new Painter(() => this.play(Infinity));
    for await (const chunk of chatStream({ ...base, ...Object.fromEntries(own) }, signal)) {
      this.chunks.push(chunk);
      painter.soon();
    }
    painter.now();
    this.markdown.end();
    this.figures = this.seen.figures();
    const { tokens, ttft_ms, took_ms, proposed_tokens, accepted_tokens } = this.figures;
    this.state.textContent = `${tokens} tokens in ${shown.ms(took_ms)}, first after ${shown.ms(ttft_ms)}` + (proposed_tokens ? `, ${accepted_tokens} of ${proposed_tokens} drafts right` : "");
  }

  /** Draw what had come this long after the start; returns the tokens of then. */
  play(elapsed_ms) {
    const from = this.played;
    while (this.played < this.chunks.length && this.chunks[this.played].at_ms - this.start_ms <= elapsed_ms) this.seen.add(this.chunks[this.played++]);
    this.seen.start_ms = this.start_ms;
    this.markdown.push(this.chunks.slice(from, this.played).map((chunk) => chunk.text).join(""));
    const { tokens, tokens_per_s } = this.seen.figures();
    this.rate.textContent = shown.rate(tokens_per_s);
    this.bar.style.transform = `scaleX(${Math.min(1, tokens / this.most)})`;
    this.body.scrollTop = this.body.scrollHeight;
    return tokens;
  }
}

/** `requestFor(messages)`: a request with the settings of the chat. */
export function setUpRace(requestFor) {
  const lanes = [new Lane("A", 0), new Lane("B", 31)], [a, b] = lanes;
  let controller = null;
  const how = () => ($("race-how").textContent = HOW[$("race-order").value]);
  const lead = (winner) => lanes.forEach((lane) => lane.element.classList.toggle("ahead", lane === winner));

  async function race(signal) {
    const max_completion_tokens = $("race-tokens").valueAsNumber || 256;
    const base = { ...requestFor([{ role: "user", content: $("race-prompt").value }]), max_completion_tokens };
    lanes.forEach((lane) => (lane.clear(), (lane.figures = null), (lane.state.textContent = "waits")));
    if ($("race-order").value === "together") {
      say("Both run at the same time.");
      return Promise.all(lanes.map((lane) => lane.run(base, signal)));
    }
    say("The prompt is read once.");
    for await (const _ of chatStream({ ...base, max_completion_tokens: 1 }, signal));
    for (const lane of lanes) {
      say(`${lane.name} runs alone.`);
      await lane.run(base, signal);
    }
    return replay(signal);
  }

  /** Both recordings from their starts, in real time. */
  async function replay(signal) {
    const start_ms = performance.now(), until_ms = Math.max(a.figures.took_ms, b.figures.took_ms) + 20;
    lanes.forEach((lane) => lane.clear());
    for (let elapsed_ms = 0; elapsed_ms < until_ms; ) {
      elapsed_ms = signal.aborted ? Infinity : await new Promise((tick) => requestAnimationFrame(() => tick(performance.now() - start_ms)));
      const [in_a, in_b] = lanes.map((lane) => lane.play(elapsed_ms));
      lead(in_a > in_b ? a : in_b > in_a ? b : null);
      say(`Replay of what was measured, in real time: ${in_a === in_b ? "level" : `${in_a > in_b ? "A" : "B"} is ${Math.abs(in_a - in_b)} tokens ahead`}.`);
    }
    lanes.forEach((lane) => lane.markdown.end());
  }

  function verdict() {
    const [rate_a, rate_b] = lanes.map((lane) => lane.figures.tokens_per_s), ratio = Math.max(rate_a, rate_b) / Math.min(rate_a, rate_b);
    const fast = rate_a > rate_b ? a : b, level = !(ratio >= 1.02), both = `${shown.rate(rate_a)} and ${shown.rate(rate_b)}`;
    const [text_a, text_b] = lanes.map((lane) => lane.chunks.map((chunk) => chunk.text).join(""));
    lead(level ? null : fast);
    say(`${level ? "Level" : `${fast.name} is ${ratio.toFixed(2)}× as fast`}: ${both} tokens/s. The answers ${text_a === text_b ? "are the same, character for character" : "differ"}.`);
  }

  /** `work` until it ends or is stopped, then the verdict. */
  async function measured(work) {
    controller = new AbortController();
    $("race-go").textContent = "Stop";
    await work(controller.signal).then(verdict, (error) => say(error.name === "AbortError" ? "Stopped." : error.message));
    controller = null;
    $("race-go").textContent = "Race";
    $("race-replay").hidden = !a.figures || !b.figures;
    lanes.forEach((lane) => lane.figures || (lane.state.textContent = "not finished"));
  }

  $("lanes").append(...lanes.map((lane) => lane.element));
  $("race-order").addEventListener("change", how);
  how();
  $("race-form").addEventListener("submit", (event) => {
    event.preventDefault();
    controller ? controller.abort() : measured(race);
  });
  $("race-replay").addEventListener("click", () => controller || measured(replay));
  document.addEventListener("keydown", ({ key }) => key === "Escape" && controller?.abort());
}
