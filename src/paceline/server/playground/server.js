// What the server does now: /metrics read every second while somebody looks, /progress while it loads.

import { json, Refused, text } from "./api.js";
import { bar, by, el, facts, number, percent, svg } from "./dom.js";

const EVERY_MS = 1000;
const KEPT = 60;
const SAMPLE = /^paceline_(\w+?)(?:\{(.*)\})? (\S+)$/gm;

/** Samples by name; of those with labels a list of [labels, value]. */
export function samples(page) {
  const found = { one: {}, many: {} };
  for (const [, name, labels, value] of page.matchAll(SAMPLE)) {
    if (labels === undefined) found.one[name] = Number(value);
    else {
      const named = Object.fromEntries([...labels.matchAll(/(\w+)="([^"]*)"/g)].map(([, key, said]) => [key, said]));
      (found.many[name] ??= []).push([named, Number(value)]);
    }
  }
  return found;
}

export class Server {
  /** onFault(error): what it cannot be asked. */
  constructor(onFault) {
    this.onFault = onFault;
    this.model = undefined;
    this.isMet = false; // whether the model is that of the server that runs
    this.paces = []; // tokens a second
    this.before = undefined; // the last page, and when
    this.#again(0);
  }

  /** Ask at once: with another key, say. */
  retry() {
    this.#again(0);
  }

  #again(ms) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#look(), ms);
  }

  async #look() {
    try {
      if (!document.hidden) await this.#ask();
    } catch (error) {
      this.#tellFault(error);
    } finally {
      this.#again(EVERY_MS);
    }
  }

  async #ask() {
    try {
      if (!this.isMet) await this.#meet();
      this.#show(samples(await text("metrics")));
      this.#say("ready", "ready");
    } catch (error) {
      if (error.code !== "loading") throw error;
      this.#forget();
      this.#showLoad(await json("progress"));
    }
  }

  async #meet() {
    const [model] = (await json("v1/models")).data;
    this.model = model.id;
    this.isMet = true;
    by("model").textContent = `${model.id} · ${model.max_model_len} tokens`;
    by("loading").hidden = true;
    this.onFault(undefined);
  }

  /** It may be another when it answers again. */
  #forget() {
    this.isMet = false;
    this.before = undefined;
  }

  #showLoad({ phase, percent: done }) {
    this.#say("", done === null ? phase : `${phase}, ${done.toFixed(0)} %`);
    by("loading").hidden = false;
    if (done === null) by("loading").removeAttribute("value");
    else by("loading").value = done;
  }

  #tellFault(error) {
    if (!(error instanceof Refused)) {
      this.#forget();
      this.#say("down", "does not answer");
      return;
    }
    this.#say("down", error.status === 401 ? "asks for a key" : `answers ${error.status}`);
    this.onFault(error);
  }

  #say(kind, words) {
    const state = by("state");
    if (state.textContent !== words) state.textContent = words;
    state.className = `state ${kind}`;
  }

  #show({ one, many }) {
    const share = (part, whole) => (one[whole] ? one[part] / one[whole] : undefined);
    facts(by("load"), [
      ["running", one.requests_running],
      ["waiting", one.requests_waiting],
      ["prefix hits", percent(share("prefix_cache_hit_tokens_total", "prefix_cache_queried_tokens_total"), 1)],
      ["drafts accepted", percent(share("accepted_draft_tokens_total", "draft_tokens_total"), 1)],
      ["preemptions", one.preemptions_total],
      ["tokens", one.generation_tokens_total],
      ["pace", number(this.#pace(one), 1) && `${number(this.paces.at(-1), 1)} tokens/s`],
    ]);
    by("pool").replaceChildren(...pools(many.cache_pages ?? []));
    by("pace").replaceChildren(...this.#sparkline());
  }

  #pace(one) {
    const now = { ms: performance.now(), tokens: one.generation_tokens_total };
    if (this.before) this.paces.push((1000 * (now.tokens - this.before.tokens)) / (now.ms - this.before.ms));
    this.before = now;
    this.paces = this.paces.slice(-KEPT);
    return this.paces.at(-1);
  }

  #sparkline() {
    const most = Math.max(...this.paces);
    if (this.paces.length < 2 || !(most > 0)) return [];
    const points = this.paces.map((pace, at) => `${at} ${1 - pace / most}`);
    const label = `Tokens a second of ended requests, the last ${this.paces.length} s, at most ${most.toFixed(1)}`;
    const marks = { viewBox: `0 -0.05 ${KEPT - 1} 1.1`, preserveAspectRatio: "none", role: "img", "aria-label": label };
    return [svg("svg", marks, svg("path", { d: `M${points.join("L")}` })), el("p", { class: "hint" }, label)];
  }
}

/** A bar for each cache group: pages of requests, cached ones, free ones. */
function pools(pages) {
  const groups = {};
  for (const [{ group, state }, count] of pages) (groups[group] ??= {})[state] = count;
  const rows = Object.entries(groups).map(([name, { used, cached, free }]) => {
    const total = used + cached + free;
    const row = bar(name, [["used", used / total], ["cached", cached / total]], String(total));
    row.title = `${used} pages used, ${cached} cached, ${free} free`;
    row.append(el("span", { class: "hint told" }, row.title));
    return row;
  });
  return rows.length ? [el("p", { class: "hint" }, "Pages of each cache group"), ...rows] : [];
}
