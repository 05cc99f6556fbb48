"use strict";
// Shows in the panel what is known of the token that is pointed at. Text goes in as text, never as markup.
const told = JSON.parse(document.getElementById("told").textContent);
const main = document.querySelector("main");
const panel = document.querySelector("aside");
let chosen = null;

function element(name, attributes, ...children) {
  const svg = ["svg", "rect", "line"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// What can't be seen is spelt out, as in the text.
function visible(token) {
  return told.texts[token].replace(/[\p{C}\u2028\u2029]/gu, (c) =>
    c === "\u200c" || c === "\u200d" ? c : c === "\n" ? "↵" : c === "\t" ? "⇥"
      : "U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"));
}

function number(x) {
  return x === null ? "not a number" : x === 0 || x >= 0.001 ? x.toFixed(3) : x.toExponential(1);
}

function table(caption, choices) {
  if (!choices.length) return "";
  const rows = choices.map(([token, p]) => element("tr", {},
    element("td", {}, visible(token)), element("td", { class: "number" }, number(p)),
    element("td", {}, bar(p, null, 120))));
  return element("table", {}, element("caption", {}, caption), element("tbody", {}, ...rows));
}

// A track from 0 to 1, filled up to a probability, with a mark where the draw fell.
function bar(filled, draw, width) {
  const parts = [
    element("rect", { class: "track", width: "100%", height: 12 }),
    element("rect", { class: "fill", width: 100 * (filled ?? 0) + "%", height: 12 }),
  ];
  if (draw !== null) parts.push(element("line", { class: "draw", x1: 100 * draw + "%", x2: 100 * draw + "%", y1: 0, y2: 12 }));
  return element("svg", { width, height: 12 }, ...parts);
}

function head(token, ...rest) {
  return element("div", {}, element("b", {}, visible(token)), ` (token ${token}) `, ...rest);
}

// What became of a proposal. Where the step adds no token of the rule's own, a stop token ended the text.
function fate(step, i, kept) {
  if (i < kept) return step.sources[i];
  if (step.tokens.length === kept) return "behind the end of the text";
  return i === kept ? "rejected" : "behind a rejected token";
}

function proposalPanel(step, i, kept) {
  const one = step.proposals[i];
  const lines = [head(one.token, `proposal ${i + 1} of ${step.proposals.length}: ${fate(step, i, kept)}`),
    element("div", {}, `target p = ${number(one.p)}, draft q = ${number(one.q)}, after the sampling options`)];
  if (one.u !== null) {
    const passed = one.u < one.accept;
    lines.push(element("div", {}, `draw u = ${number(one.u)} ${passed ? "<" : "≥"} ${number(one.accept)}, the chance to be accepted`),
      bar(one.accept, one.u, "100%"));
  }
  return [...lines, element("div", { class: "tables" },
    table("the target's likeliest", one.target), table("the draft's likeliest", one.draft))];
}

function lastPanel(step, i) {
  return [head(step.tokens[i], step.sources[i]),
    element("div", {}, `the target's own probability ${number(step.probs[i])}, before the sampling options`),
    element("div", { class: "tables" },
      table("drawn from", step.next), table("the target's likeliest", step.target))];
}

function show(span) {
  if (chosen) chosen.classList.remove("chosen");
  chosen = span;
  span.classList.add("chosen");
  const step = told.steps[span.parentElement.dataset.n];
  const place = [...span.parentElement.children].indexOf(span);
  const kept = step.proposals.filter((one) => one.stood).length;
  const lines = span.matches("s") || place < kept ? proposalPanel(step, place, kept)
    : lastPanel(step, step.tokens.length - 1);
  const title = element("div", {}, `Step ${+span.parentElement.dataset.n + 1} of ${told.steps.length}, after ${step.start} tokens.`);
  panel.replaceChildren(...lines, title);
}

function token(event) {
  const found = event.target.closest(".step > *");
  return found && main.contains(found) ? found : null;
}

let pinned = false;
main.addEventListener("mouseover", (event) => { const span = token(event); if (span && !pinned) show(span); });
main.addEventListener("click", (event) => {
  const span = token(event);
  pinned = Boolean(span) && !(pinned && span === chosen);
  if (span) show(span);
});
main.addEventListener("keydown", (event) => {
  const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!way) return;
  const all = [...main.querySelectorAll(".step > *")];
  let i = chosen ? all.indexOf(chosen) + way : 0;
  while (all[i] && all[i].offsetParent === null) i += way; // rejected ones may be hidden
  const next = all[i];
  if (next) { pinned = true; show(next); next.scrollIntoView({ block: "nearest" }); event.preventDefault(); }
});
