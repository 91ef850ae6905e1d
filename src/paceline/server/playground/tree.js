// The draft tree of a round as a drawing: what was taken, what was not, and the target's own token.

import { brief, el, svg } from "./dom.js";

const WIDTH = 84;
const HEIGHT = 24;
const STEP_X = WIDTH + 20;
const STEP_Y = HEIGHT + 8;
const RANK = { bonus: 0, taken: 0, rejected: 1 }; // from above: the path, then what was not taken

export function drawRound(answer, index) {
  const round = answer.rounds[index];
  const before = answer.tokens[round.at - 1] ?? answer.promptTokens.at(-1);
  const bonus = answer.tokens[round.at + round.emitted - 1]; // absent where a stop text cut it
  const nodes = laidOut(round, before, bonus);
  const width = Math.max(...nodes.map((node) => node.x)) + WIDTH + 4;
  const height = Math.max(...nodes.map((node) => node.y)) + HEIGHT + 4;
  const label = told(round, index, bonus);
  const drawing = svg("svg", { width, height, viewBox: `-2 -2 ${width} ${height}`, role: "img", "aria-label": label });
  for (const node of nodes) if (node.above) drawing.append(edge(node.above, node));
  for (const node of nodes) drawing.append(box(node));
  return el("div", {}, el("p", { class: "hint" }, label), drawing);
}

function told(round, index, bonus) {
  const taken = round.drafts.filter((draft) => draft.taken);
  const own = bonus ? `; then the target's own ${brief(bonus.text)}` : "";
  return `Round ${index + 1}: ${round.drafts.length} drafts verified, ${taken.length} taken${own}.`;
}

/** Nodes with places: depth to the right, leaves below one another. */
function laidOut(round, before, bonus) {
  const root = { text: before?.text ?? "", kind: "root", depth: 0, children: [] };
  const drafts = round.drafts.map((draft) => ({
    text: draft.text || `⟨${draft.id}⟩`,
    kind: draft.taken ? "taken" : "rejected",
    children: [],
  }));
  round.drafts.forEach((draft, at) => hang(drafts[at], draft.parent < 0 ? root : drafts[draft.parent]));
  const end = drafts.findLast((node) => node.kind === "taken") ?? root;
  const all = [root, ...drafts];
  if (bonus) {
    const node = { text: bonus.text || `⟨${bonus.id}⟩`, kind: "bonus", children: [] };
    hang(node, end);
    all.push(node);
  }
  let leaves = 0;
  const place = (node) => {
    node.children.sort((one, other) => RANK[one.kind] - RANK[other.kind]);
    node.x = node.depth * STEP_X;
    node.children.forEach(place);
    node.y = node.children.length ? node.children[0].y : leaves++ * STEP_Y;
  };
  place(root);
  return all;
}

function hang(node, above) {
  node.above = above;
  node.depth = above.depth + 1;
  above.children.push(node);
}

function edge(from, to) {
  const [x, y] = [from.x + WIDTH, from.y + HEIGHT / 2];
  const [toX, toY] = [to.x, to.y + HEIGHT / 2];
  const middle = (x + toX) / 2;
  const path = `M${x} ${y}C${middle} ${y} ${middle} ${toY} ${toX} ${toY}`;
  return svg("path", { class: to.kind === "rejected" ? "edge" : "edge taken", d: path });
}

function box(node) {
  const text = svg("text", { x: node.x + 8, y: node.y + 16 }, brief(node.text, 9));
  const frame = svg("rect", { x: node.x, y: node.y, width: WIDTH, height: HEIGHT, rx: 5 });
  const title = svg("title", {}, `${JSON.stringify(node.text)}: ${node.kind}`);
  return svg("g", { class: node.kind }, title, frame, text);
}
