// Elements, in few words.

const SVG = "http://www.w3.org/2000/svg";

export const by = (id) => document.getElementById(id);

/** An element.  attributes: set as they are; text goes in as text, never as HTML. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== undefined));
  return node;
}

/** Terms and what they are, into a <dl>; those without a value are left out. */
export function facts(list, pairs) {
  const told = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
  list.replaceChildren(...told.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, String(value))]));
}

/** A row of a bar chart.  parts: [class, share of 1]. */
export function bar(name, parts, value, own = false) {
  const spans = parts.map(([kind, share]) => {
    const span = el("span", { class: kind });
    span.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
    return span;
  });
  const row = el("div", { class: own ? "bar-row own" : "bar-row" });
  row.append(el("span", { title: name }, name), el("span", { class: "track", "aria-hidden": "true" }, ...spans));
  row.append(el("span", {}, value));
  return row;
}

const SIGNS = { "\n": "↵\n", "\t": "⇥\t" };

/** A token's text where line ends and tabs can be seen. */
export const shown = (text) => text.replace(/[\n\t]/g, (sign) => SIGNS[sign]);

/** On one line, short. */
export function brief(text, most = 14) {
  const line = text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  return line.length > most ? `${line.slice(0, most - 1)}…` : line || "∅";
}

export const number = (value, digits = 2) => (value === undefined || value === null ? undefined : value.toFixed(digits));
export const percent = (share, digits = 0) => (share === undefined ? undefined : `${(100 * share).toFixed(digits)} %`);
