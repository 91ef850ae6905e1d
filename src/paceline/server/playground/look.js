// What is shown beside the conversation: a token, its round, the answer, the history.

import { bar, brief, by, el, facts, number, percent } from "./dom.js";
import { drawRound } from "./tree.js";

/** A token: where it came from, how likely it was, what else could have been. */
export function showToken(answer, at) {
  const token = answer.tokens[at];
  const list = el("dl", { class: "facts" });
  const round = answer.rounds[token.round];
  facts(list, [
    ["text", JSON.stringify(token.text)],
    ["id", token.id],
    ["origin", origin(token, round)],
    ["round", round && `${token.round + 1}, token ${at - round.at + 1} of ${round.emitted}`],
    ["rejected there", round && round.drafts.filter((draft) => !draft.taken).length],
    ["log-probability", number(token.logprob, 3)],
    ["came after", `${token.ms.toFixed(0)} ms`],
  ]);
  by("token").replaceChildren(list, alternatives(token));
}

function origin(token, round) {
  if (token.drafted) return "drafted, accepted by the target";
  return round ? "sampled by the target behind its drafts" : "sampled by the target";
}

function alternatives(token) {
  const top = token.top ?? [];
  const named = (each) => each.text === token.text;
  const own = token.logprob === undefined || top.some(named) ? [] : [{ text: token.text, logprob: token.logprob }];
  const rows = [...top, ...own].map((each) => {
    const share = Math.exp(each.logprob);
    return bar(brief(each.text), [["", share]], percent(share, 1), named(each));
  });
  return el("div", { class: "bars", role: "group", "aria-label": "Likeliest tokens here" }, ...rows);
}

/** The strip of rounds, and the tree of one: the chosen, or the newest. */
export class Rounds {
  constructor(onChoose) {
    this.strip = by("rounds");
    this.onChoose = onChoose;
    this.answer = undefined;
    this.at = undefined;
    this.strip.addEventListener("click", (event) => {
      const at = event.target.dataset.at;
      if (at !== undefined) this.onChoose(this.answer, this.answer.rounds[Number(at)].at);
    });
  }

  show(answer, chosen) {
    if (answer !== this.answer) {
      this.strip.replaceChildren();
      this.at = undefined;
    }
    this.answer = answer;
    const most = Math.max(1, ...answer.rounds.map((round) => round.emitted));
    for (const [at, round] of answer.rounds.entries()) {
      const button = this.strip.children[at] ?? this.strip.appendChild(el("button", { type: "button", "data-at": at }));
      button.className = round.emitted > 1 ? "" : "none";
      button.style.height = `${(100 * round.emitted) / most}%`;
      button.setAttribute("aria-label", `Round ${at + 1}: ${round.emitted} tokens`);
      button.setAttribute("aria-pressed", String(at === chosen));
    }
    this.#draw(chosen ?? answer.rounds.length - 1);
  }

  #draw(at) {
    if (at === this.at) return;
    this.at = at;
    const none = "No rounds: nobody drafted for this answer.";
    by("tree").replaceChildren(at < 0 ? el("p", { class: "hint" }, none) : drawRound(this.answer, at));
  }
}

export function showAnswer(answer) {
  const { verified, taken } = answer.drafts;
  const prompt = answer.promptTokens.length || answer.usage?.prompt_tokens;
  facts(by("facts"), [
    ["prompt", prompt && `${prompt} tokens, ${answer.cached} hit`],
    ["tokens", answer.tokens.length],
    ["first token", answer.firstMs && `${answer.firstMs.toFixed(0)} ms`],
    ["pace", answer.tokensPerSecond && `${answer.tokensPerSecond.toFixed(1)} tokens/s`],
    ["rounds", answer.rounds.length || undefined],
    ["tokens per round", number(answer.perRound)],
    ["drafts taken", verified ? `${taken} of ${verified}` : undefined],
    ["end", answer.finish],
    ["request", answer.requestId],
  ]);
  const shares = answer.acceptance.map((share, at) => bar(`≥ ${at + 1} taken`, [["", share]], percent(share)));
  by("acceptance").replaceChildren(...shares);
  if (answer.receipt) by("receipt").textContent = JSON.stringify(answer.receipt, null, 1);
}

/** A line of the history; onOpen: it is to be shown again. */
export function noteAnswer(answer, index, onOpen) {
  const open = el("button", { type: "button", title: "Show it again" }, brief(answer.prompt, 32));
  open.addEventListener("click", onOpen);
  const { speculative } = answer.body;
  const cells = [
    String(index),
    open,
    speculative === false ? "off" : answer.rounds.length ? "on" : "none",
    answer.promptTokens.length || answer.usage?.prompt_tokens,
    answer.cached,
    answer.tokens.length,
    answer.firstMs === undefined ? undefined : `${answer.firstMs.toFixed(0)} ms`,
    number(answer.tokensPerSecond, 1),
    number(answer.perRound),
    answer.finish ?? "stopped",
  ];
  by("history").prepend(el("tr", {}, ...cells.map((cell) => el("td", {}, cell ?? "–"))));
}
