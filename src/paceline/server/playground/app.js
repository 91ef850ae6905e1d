// The page: what is asked, by whom it is shown.

import { curl, stream, useKey } from "./api.js";
import { Answer } from "./answer.js";
import { by } from "./dom.js";
import { noteAnswer, Rounds, showAnswer, showToken } from "./look.js";
import { Server } from "./server.js";
import { Talk } from "./talk.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed"];
const THEME = "paceline-theme";

let messages = []; // of the conversation
let running; // what stops the request that runs
let numAnswers = 0;

const talk = new Talk(by("said"), look);
const rounds = new Rounds((answer, at) => talk.choose(answer, at));
const server = new Server((error) => tellError(error));

function look(answer, at) {
  showToken(answer, at);
  rounds.show(answer, answer.tokens[at].round);
  showAnswer(answer);
}

function tellError(error) {
  by("error").hidden = error === undefined;
  const about = error?.requestId ? ` (request ${error.requestId})` : "";
  by("error").textContent = error === undefined ? "" : `${error.message}${about}`;
}

const isChat = () => document.querySelector("[name=mode]:checked").value === "chat";

/** [path, body] of what the form says.  Raises SyntaxError for fields that are no JSON. */
function asked(prompt) {
  const more = by("more").value.trim();
  const body = { model: server.model ?? "bundled" };
  if (isChat()) {
    const system = by("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    body.messages = [...first, ...messages, { role: "user", content: prompt }];
  } else {
    body.prompt = prompt;
  }
  for (const name of NUMBERS) if (by(name).value !== "") body[name] = by(name).valueAsNumber;
  if (by("stop").value) body.stop = by("stop").value;
  const top = by("alternatives").valueAsNumber;
  if (!Number.isNaN(top)) Object.assign(body, isChat() ? { logprobs: true, top_logprobs: top } : { logprobs: top });
  if (!by("speculative").checked) body.speculative = false;
  Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  Object.assign(body, { receipt: true, trace_tokens: true });
  Object.assign(body, more ? JSON.parse(more) : {});
  return [isChat() ? "v1/chat/completions" : "v1/completions", body];
}

async function send() {
  const prompt = by("prompt").value;
  if (running || !prompt) return;
  tellError();
  let answer;
  try {
    answer = new Answer(...asked(prompt), prompt);
  } catch (error) {
    tellError(error);
    return;
  }
  const said = messages;
  if (!isChat()) talk.clear();
  talk.begin(answer);
  running = new AbortController();
  mark("generating");
  try {
    const begun = (id) => (answer.requestId = id);
    await stream(answer.path, answer.body, running.signal, begun, (found) => {
      answer.take(found);
      show(answer);
    });
    by("note").textContent = `done: ${answer.tokens.length} tokens`;
  } catch (error) {
    if (error.name !== "AbortError") tellError(error);
    by("note").textContent = error.name === "AbortError" ? "stopped" : "failed";
  }
  running = undefined;
  mark();
  end(answer, said);
}

function show(answer) {
  talk.grow(answer);
  rounds.show(answer);
  showAnswer(answer);
}

/** said: the conversation it belongs to. */
function end(answer, said) {
  show(answer);
  if (!answer.text && !answer.tokens.length) return;
  if (answer.body.messages) {
    said.push({ role: "user", content: answer.prompt }, { role: "assistant", content: answer.text });
    if (by("prompt").value === answer.prompt) by("prompt").value = "";
  }
  noteAnswer(answer, (numAnswers += 1), () => {
    begin(answer.body.messages ? [...said] : []);
    talk.begin(answer);
    show(answer);
    by("said").focus();
  });
}

/** A conversation of which so much was said. */
function begin(said = []) {
  running?.abort();
  messages = said;
  talk.clear();
}

function mark(words) {
  by("send").disabled = words !== undefined;
  by("stopper").disabled = words === undefined;
  if (words) by("note").textContent = words;
}

async function copyCurl() {
  try {
    by("command").textContent = curl(...asked(by("prompt").value));
    by("command").hidden = false;
    await navigator.clipboard?.writeText(by("command").textContent); // absent where there is no TLS
    by("note").textContent = navigator.clipboard ? "copied" : "copy it from here";
  } catch (error) {
    tellError(error);
  }
}

function useTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
by("stopper").addEventListener("click", () => running?.abort());
by("curl").addEventListener("click", copyCurl);
by("clear").addEventListener("click", () => {
  begin();
  by("prompt").focus();
});
by("key").addEventListener("input", () => {
  useKey(by("key").value);
  server.retry();
});
by("theme").addEventListener("click", () => {
  const usual = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const theme = (document.documentElement.dataset.theme ?? usual) === "dark" ? "light" : "dark";
  useTheme(theme);
  localStorage.setItem(THEME, theme);
});
for (const radio of document.querySelectorAll("[name=mode]")) {
  radio.addEventListener("change", () => document.body.classList.toggle("completion", !isChat()));
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
});
useTheme(localStorage.getItem(THEME));
by("prompt").focus();
