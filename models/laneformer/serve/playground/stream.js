// One streamed answer of the server, and the measuring of its speed.

/** What the server refused or what broke; `status` 0: the connection. */
export class Failure extends Error {
  constructor(status, message, retryAfterS = null) {
    super(message);
    Object.assign(this, { status, retryAfterS });
  }
}

export const account = { key: sessionStorage.getItem("laneformer.key") || "" };  // the API key, for this tab only
const LOST = new Failure(0, "The connection was lost. The answer so far is kept.");

/** fetch with the API key; throws a Failure with the server's own words. */
export async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json", ...(account.key && { Authorization: `Bearer ${account.key}` }) };
  const answer = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Failure(0, "The server cannot be reached. Is it still running?");
  });
  if (answer.ok) return answer;
  const text = await answer.text(), wait = answer.headers.get("Retry-After");
  let message = text.slice(0, 300) || `The server answered with status ${answer.status}.`;
  try {
    message = JSON.parse(text).error.message;
  } catch { /* not in OpenAI's form: its text as it is */ }
  throw new Failure(answer.status, message, wait && Number(wait));
}

/**
 * The chunks of a chat completion as they come: {at_ms, text, reasoning, tokens, finish, usage}.
 *
 * tokens: how many there are by now; one chunk holds a run of them, so the server is asked to count. Chunks that the
 * network delivers together have one time of arrival. Throws a Failure where the stream ends before the answer does.
 */
export async function* chatStream(request, signal) {
  const stream_options = { include_usage: true, continuous_usage_stats: true };
  const body = JSON.stringify({ ...request, stream: true, stream_options });
  const answer = await ask("v1/chat/completions", { method: "POST", body, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", finished = false, tokens = 0;
  for (;;) {
    const read = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : LOST;
    });
    const at_ms = performance.now(), events = (rest + (read.value || "")).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const data = event.match(/^data: ?(.*)$/m)?.[1];  // without data: a comment that keeps the connection alive
      if (!data || data === "[DONE]") continue;
      const { choices = [], usage = null, error } = JSON.parse(data);
      if (error) throw new Failure(Number(error.code) || 500, error.message);
      const { content, reasoning_content } = choices[0]?.delta ?? {}, finish = choices[0]?.finish_reason || null;
      const text = content || "", reasoning = reasoning_content || "";
      finished ||= finish !== null;
      tokens = usage ? usage.completion_tokens : tokens + (text || reasoning ? 1 : 0);
      yield { at_ms, text, reasoning, tokens, finish, usage };
    }
    if (read.done) break;
  }
  if (!finished) throw LOST;
}

/** Tokens and their times of arrival in this browser; all figures of one answer. */
export class Meter {
  constructor() {
    Object.assign(this, { start_ms: performance.now(), arrivals: [], usage: null, finish: null });
  }

  add({ at_ms, tokens, usage, finish }) {
    this.usage = usage || this.usage;
    this.finish = finish || this.finish;
    const last = this.arrivals.at(-1);
    if (tokens <= (last?.tokens ?? 0)) return;  // the role, the end
    if (last?.at_ms === at_ms) last.tokens = tokens;
    else this.arrivals.push({ at_ms, tokens });
  }

  /** Times in ms, null where there is none yet; tokens/s after the first arrival: reading the prompt does not count. */
  figures() {
    const { arrivals, usage, start_ms } = this, first = arrivals[0], last = arrivals.at(-1);
    // of each token: those that come together share the time since the last ones, as the rate counts them
    const gaps = arrivals.slice(1).flatMap(({ at_ms, tokens }, i) => {
      const count = tokens - arrivals[i].tokens;
      return Array(count).fill((at_ms - arrivals[i].at_ms) / count);
    }).sort((a, b) => a - b);
    const { accepted_prediction_tokens: accepted = 0, rejected_prediction_tokens: rejected = 0 } = usage?.completion_tokens_details ?? {};
    return {
      tokens: last?.tokens ?? 0, ttft_ms: first ? first.at_ms - start_ms : null, took_ms: last ? last.at_ms - start_ms : 0,
      tokens_per_s: gaps.length ? (1000 * (last.tokens - first.tokens)) / (last.at_ms - first.at_ms) : null,
      gap_p50_ms: gaps[Math.floor(gaps.length * 0.5)] ?? null, gap_p99_ms: gaps[Math.floor(gaps.length * 0.99)] ?? null,
      prompt_tokens: usage?.prompt_tokens ?? null, cached_tokens: usage?.prompt_tokens_details?.cached_tokens ?? null,
      accepted_tokens: accepted ?? 0, proposed_tokens: (accepted ?? 0) + (rejected ?? 0), finish_reason: this.finish,
    };
  }
}

/** Calls `draw` once in each animation frame in which something has changed, however many tokens came. */
export class Painter {
  constructor(draw) {
    Object.assign(this, { draw, waiting: 0 });
  }

  soon() {
    this.waiting ||= requestAnimationFrame(() => this.now());
  }

  now() {  // also at the end: a hidden tab has no frames
    cancelAnimationFrame(this.waiting);
    this.waiting = 0;
    this.draw();
  }
}

export const format = {
  rate: (value) => (value === null ? "–" : value >= 99.95 ? Math.round(value).toLocaleString("en") : value.toFixed(1)),
  ms: (value) => (value === null ? "–" : value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value >= 99.95 ? 0 : 1)} ms`),
  bytes: (value) => (value >= 1e9 ? `${(value / 1e9).toPrecision(3)} GB` : `${Math.round(value / 1e6)} MB`),
};
