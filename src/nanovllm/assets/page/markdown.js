// Markdown as elements. `marked` only reads; what it finds becomes elements of the kinds below, and HTML becomes text.

import { copyButton, el } from "./dom.js";
import { lexer } from "./vendor/marked/marked.esm.js";

const REFERENCE = /^ {0,3}\[[^\]]+\]:/m; // a definition that earlier text may use
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", ndash: "–", mdash: "—", hellip: "…", times: "×", rarr: "→" };

// Markdown that grows. Blocks that two others follow will not change any more: they are read once, however long the text becomes.
export class Markdown {
  constructor() {
    this.element = el("div", { class: "markdown" });
    this.text = "";
    this.settled = 0; // characters
    this.open = []; // the elements of the text after them
  }

  set(text, ended) {
    text = text.replace(/\r\n?/g, "\n");
    if (text === this.text && !ended) return;
    const whole = !text.startsWith(this.text) || (ended && REFERENCE.test(text));
    if (whole) {
      this.settled = 0;
      this.open = [];
      this.element.replaceChildren();
    }
    this.text = text;
    for (const element of this.open) element.remove();
    this.open = [];
    let tokens;
    try {
      tokens = lexer(text.slice(this.settled));
    } catch {
      this.settled = 0;
      this.element.replaceChildren();
      this.open = [el("p", {}, text)]; // nested too deeply to be read
      this.element.append(...this.open);
      return;
    }
    const kept = tokens.filter((token) => token.type !== "space").slice(-2)[0];
    const last = tokens.indexOf(kept);
    tokens.forEach((token, place) => {
      const made = block(token);
      this.element.append(...made);
      if (place < last) this.settled += token.raw.length;
      else this.open.push(...made);
    });
  }
}

const blocks = {
  space: () => [],
  def: () => [],
  hr: () => [el("hr")],
  heading: (token) => [el(`h${Math.min(token.depth + 2, 6)}`, {}, ...inline(token.tokens))],
  paragraph: (token) => [el("p", {}, ...inline(token.tokens))],
  text: (token) => (token.tokens ? inline(token.tokens) : [decoded(token.text)]),
  html: (token) => [el("p", { class: "source" }, token.raw)],
  blockquote: (token) => [el("blockquote", {}, ...token.tokens.flatMap(block))],
  code: (token) => [code(token)],
  list: (token) => [el(token.ordered ? "ol" : "ul", { start: token.ordered && token.start !== 1 ? token.start : null }, ...token.items.map(item))],
  table: (token) => [table(token)],
};

const inlines = {
  text: (token) => (token.tokens ? inline(token.tokens) : [decoded(token.text)]),
  escape: (token) => [token.text],
  html: (token) => [token.raw],
  br: () => [el("br")],
  strong: (token) => [el("strong", {}, ...inline(token.tokens))],
  em: (token) => [el("em", {}, ...inline(token.tokens))],
  del: (token) => [el("del", {}, ...inline(token.tokens))],
  codespan: (token) => [el("code", {}, token.text)],
  link: (token) => [link(token.href, inline(token.tokens), token.raw)],
  image: (token) => [link(token.href, [token.text || token.href], token.raw)], // nothing is loaded from other hosts
};

const block = (token) => (Object.hasOwn(blocks, token.type) ? blocks[token.type](token) : inline([token]));
const inline = (tokens) => tokens.flatMap((token) => (Object.hasOwn(inlines, token.type) ? inlines[token.type](token) : [token.raw]));

function link(href, children, raw) {
  if (!/^(https?:\/\/|mailto:)/i.test(href)) return raw;
  return el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

function code(token) {
  const language = (token.lang ?? "").split(/\s/, 1)[0];
  const head = el("figcaption", {}, el("span", {}, language || "text"), copyButton(() => token.text));
  return el("figure", { class: "code" }, head, el("pre", { tabindex: "0" }, el("code", {}, token.text)));
}

function item(token) {
  const mark = token.task ? [el("input", { type: "checkbox", disabled: true, checked: token.checked, "aria-label": "task" }), " "] : [];
  return el("li", {}, ...mark, ...token.tokens.filter((one) => one.type !== "checkbox").flatMap(block));
}

function table(token) {
  const cell = (tag) => (one, place) => el(tag, { class: token.align[place] ? `to-${token.align[place]}` : null }, ...inline(one.tokens));
  const head = el("thead", {}, el("tr", {}, ...token.header.map(cell("th"))));
  const rows = token.rows.map((row) => el("tr", {}, ...row.map(cell("td"))));
  return el("div", { class: "table", tabindex: "0" }, el("table", {}, head, el("tbody", {}, ...rows)));
}

// Character references are the only part of HTML that is understood.
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]+));/gi, (all, decimal, hexadecimal, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : all;
    const point = decimal ? Number(decimal) : parseInt(hexadecimal, 16);
    return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : all;
  });
}
