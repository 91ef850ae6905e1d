// The conversation, token by token: what was typed, what the model read, what it said.

import { el, shown } from "./dom.js";

export class Talk {
  /** onLook(answer, index): a token of an answer is looked at. */
  constructor(container, onLook) {
    this.container = container;
    this.onLook = onLook;
    this.chosen = undefined; // the token that is shown beside
    this.lists = new Map(); // by answer: where its tokens stand
    this.numLists = 0;
  }

  clear() {
    this.container.replaceChildren();
    this.lists.clear();
    this.chosen = undefined;
  }

  begin(answer) {
    const list = el("p", {
      class: "text",
      role: "listbox",
      tabindex: "0",
      id: `answer-${(this.numLists += 1)}`,
      "aria-label": "Answer, token by token: arrow keys choose a token, up and down a round",
    });
    const read = el("details", { hidden: true });
    const turn = el("section", { class: "turn" }, el("h3", {}, "You"), el("p", { class: "text long" }, answer.prompt));
    turn.append(read, el("h3", {}, "Answer"), list);
    this.container.append(turn);
    this.lists.set(answer, { list, read, spans: [] });
    list.addEventListener("keydown", (event) => this.#onKey(event, answer));
    for (const kind of ["mouseover", "click"]) {
      list.addEventListener(kind, (event) => {
        const at = event.target.dataset.at;
        if (at !== undefined) this.choose(answer, Number(at));
      });
    }
  }

  /** Show what has come. */
  grow(answer) {
    if (!this.lists.has(answer)) return; // it was cleared away
    const { list, read, spans } = this.lists.get(answer);
    const atEnd = this.container.scrollHeight - this.container.scrollTop - this.container.clientHeight < 60;
    if (read.hidden && answer.promptTokens.length) this.#showPrompt(answer, read);
    const added = answer.tokens.slice(spans.length).map((token, index) => {
      const at = spans.length + index;
      const kind = token.drafted ? "drafted" : "sampled";
      const marks = { class: `token ${kind}`, role: "option", id: `${list.id}-${at}`, "data-at": at };
      return el("span", { ...marks, "aria-selected": "false" }, shown(token.text));
    });
    list.append(...added);
    spans.push(...added);
    if (!answer.tokens.length) list.textContent = answer.text; // no trace of it
    if (atEnd) this.container.scrollTop = this.container.scrollHeight;
  }

  /** Look at a token. */
  choose(answer, at) {
    const found = this.lists.get(answer);
    const span = found?.spans[at];
    if (!span || span === this.chosen) return;
    const { round } = answer.tokens[at];
    for (const each of this.container.querySelectorAll(".chosen, .same-round")) {
      each.classList.remove("chosen", "same-round");
    }
    this.chosen?.setAttribute("aria-selected", "false");
    found.spans.forEach((each, index) => {
      each.classList.toggle("same-round", round !== undefined && answer.tokens[index].round === round);
    });
    span.classList.add("chosen");
    span.setAttribute("aria-selected", "true");
    found.list.setAttribute("aria-activedescendant", span.id);
    this.chosen = span;
    this.onLook(answer, at);
  }

  #showPrompt(answer, read) {
    const tokens = answer.promptTokens.map(({ id, text }, at) => {
      const kind = at < answer.cached ? "hit" : "prompt";
      return el("span", { class: `token ${kind}`, title: `${JSON.stringify(text)}, token ${id}` }, shown(text));
    });
    const told = `Prompt as the model read it: ${answer.promptTokens.length} tokens, ${answer.cached} from the prefix cache`;
    read.append(el("summary", {}, told), el("p", { class: "text long", tabindex: "0" }, ...tokens));
    read.hidden = false;
  }

  #onKey(event, answer) {
    const { spans } = this.lists.get(answer);
    const at = this.chosen ? spans.indexOf(this.chosen) : -1;
    const places = {
      ArrowRight: Math.min(at + 1, spans.length - 1),
      ArrowLeft: Math.max(at - 1, 0),
      Home: 0,
      End: spans.length - 1,
      ArrowDown: neighbour(answer, at, 1),
      ArrowUp: neighbour(answer, at, -1),
    };
    if (!(event.key in places) || !spans.length) return;
    event.preventDefault();
    this.choose(answer, places[event.key]);
    this.chosen?.scrollIntoView({ block: "nearest" });
  }
}

/** The first token of the round behind that of token `at`, or before it. */
function neighbour(answer, at, step) {
  const starts = answer.rounds.map((round) => round.at).filter((start) => start < answer.tokens.length);
  if (step > 0) return starts.find((start) => start > at) ?? answer.tokens.length - 1;
  const round = answer.tokens[at]?.round;
  const begin = round === undefined ? at : answer.rounds[round].at;
  return starts.findLast((start) => start < begin) ?? 0;
}
