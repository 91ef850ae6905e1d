// One request and what came of it; who shows it reads its fields.

export class Answer {
  constructor(path, body, prompt) {
    this.path = path;
    this.body = body;
    this.prompt = prompt; // what was typed
    this.text = ""; // as clients get it
    this.promptTokens = []; // {id, text}
    this.cached = 0; // of these, found in the prefix cache
    this.tokens = []; // {id, text, drafted, logprob, top: [{text, logprob}], round, ms}
    this.rounds = []; // {at, emitted, drafts: [{id, text, parent, taken}]}
    this.began = performance.now();
    this.firstMs = undefined;
    this.lastMs = undefined;
    this.finish = undefined;
    this.usage = undefined;
    this.receipt = undefined;
    this.requestId = undefined;
  }

  /** One document of the stream. */
  take(found) {
    if (found.usage) this.usage = found.usage;
    if (found.receipt) this.receipt = found.receipt[0];
    for (const choice of found.choices) {
      this.text += choice.text ?? choice.delta?.content ?? "";
      this.finish = choice.finish_reason ?? this.finish;
      if (choice.trace) this.#takeTrace(choice.trace, scores(choice.logprobs));
    }
  }

  #takeTrace(trace, scored) {
    if (trace.prompt) {
      this.promptTokens = trace.prompt.tokens;
      this.cached = trace.prompt.cached;
    }
    const ms = performance.now() - this.began;
    if (trace.tokens.length) {
      this.firstMs ??= ms;
      this.lastMs = ms;
    }
    const first = this.tokens.length;
    const own = scored.slice(scored.length - trace.tokens.length); // behind those of an echo
    trace.tokens.forEach((token, index) => this.tokens.push({ ...token, ...own[index], ms }));
    for (const round of trace.rounds) {
      const index = this.rounds.push(round) - 1;
      for (let at = Math.max(first, round.at); at < round.at + round.emitted && at < this.tokens.length; at += 1) {
        this.tokens[at].round = index;
      }
    }
  }

  /** Rounds that took at least so many drafts, for 1, 2, ...: [share of the rounds]. */
  get acceptance() {
    const depth = Math.max(0, ...this.rounds.map(depthOf));
    const took = (least) => this.rounds.filter((round) => round.emitted > least).length;
    return Array.from({ length: depth }, (_, index) => took(index + 1) / this.rounds.length);
  }

  get perRound() {
    const emitted = this.rounds.reduce((sum, round) => sum + round.emitted, 0);
    return this.rounds.length ? emitted / this.rounds.length : undefined;
  }

  get drafts() {
    const all = this.rounds.flatMap((round) => round.drafts);
    return { verified: all.length, taken: all.filter((draft) => draft.taken).length };
  }

  get tokensPerSecond() {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    return seconds > 0 ? (this.tokens.length - 1) / seconds : undefined;
  }
}

/** Drafts on the longest path of a round. */
function depthOf(round) {
  const depths = [];
  for (const { parent } of round.drafts) depths.push(parent < 0 ? 1 : depths[parent] + 1);
  return Math.max(0, ...depths);
}

/** Log-probabilities of either endpoint: [{logprob, top}], one for each token. */
function scores(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ logprob, top_logprobs: top }) => ({
      logprob,
      top: top.map((each) => ({ text: each.token, logprob: each.logprob })),
    }));
  }
  return logprobs.token_logprobs.map((logprob, index) => {
    const best = Object.entries(logprobs.top_logprobs[index] ?? {});
    const top = best.map(([name, value]) => ({ text: name, logprob: value }));
    return { logprob, top: top.sort((one, other) => other.logprob - one.logprob) };
  });
}
