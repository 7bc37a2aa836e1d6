// Who owns the engine's KV pages, live: figures, a map of the pages, and the tree of shared prefixes.

import { call } from "./api.js";
import { byId, el } from "./dom.js";
import { idOf } from "./kept.js";
import { amount } from "./units.js";

const KINDS = {
  chunks: "chunks", both: "chunks and requests", requests: "requests", others: "chunks and requests of other keys",
  index: "earlier prompts and replies, for reuse", free: "free",
};
const EVERY = 1000; // milliseconds
const WIDEST = 24; // pages of a line of the tree that are drawn one by one

export class Memory {
  // `titleOf` gives the title of the chat of a message.
  constructor(titleOf) {
    this.titles = new Map(); // by the names of chunks
    this.titleOf = titleOf;
    this.panel = byId("memory");
    this.map = byId("memory-map");
    this.parts = new Map(Object.keys(KINDS).map((kind) => [kind, el("span", { class: `part ${kind}` })]));
    this.counts = new Map(Object.keys(KINDS).map((kind) => [kind, el("span")]));
    byId("memory-bar").replaceChildren(...this.parts.values());
    const legend = Object.entries(KINDS).map(([kind, words]) => el("li", {}, el("span", { class: `mark ${kind}` }), this.counts.get(kind), ` ${words}`));
    byId("memory-legend").replaceChildren(...legend);
    this.drawn = []; // what each cell of the map shows
    this.lines = ""; // what the tree shows
  }

  // Looks at once, and then while the panel is open and the tab is seen.
  async look() {
    clearTimeout(this.timer);
    if (this.panel.hidden || document.hidden) return;
    try {
      const found = await (await call("v1/memory")).json();
      for (const one of found.tree) one.text = await this.titled(one.text);
      this.draw(found);
      byId("memory-wrong").textContent = "";
    } catch (error) {
      byId("memory-wrong").textContent = error.message;
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.look(), EVERY);
  }

  // The chunks of chats are called by the titles of the chats.
  async titled(text) {
    for (const [name] of text.matchAll(/\bchat-[0-9a-f]{24}\b/g)) {
      const title = this.titles.get(name) ?? (await this.titleOf(idOf(name)));
      if (!title) continue; // of another browser
      this.titles.set(name, title);
      text = text.replace(name, () => `chat “${title}”`); // a title may hold "$&"
    }
    return text;
  }

  draw({ pages, page_size: size, page_bytes: bytes, shared, saved, map, tree, more_owners: more }) {
    const used = pages.total - pages.free;
    const sharing = shared ? `${shared} shared, which saves ${saved} (${amount(saved * bytes)}).` : "None is shared.";
    byId("memory-told").textContent = `${used} of ${pages.total} pages used, ${size} tokens and ${amount(bytes)} each. ${sharing}`;
    for (const [kind, part] of this.parts) {
      part.style.flexGrow = pages[kind];
      this.counts.get(kind).textContent = pages[kind];
      this.counts.get(kind).parentElement.hidden = kind === "others" && !pages.others;
    }
    this.drawMap(map);
    const lines = JSON.stringify([tree, more]);
    if (lines === this.lines) return;
    this.lines = lines;
    const rows = tree.map(line);
    if (more) rows.push(el("li", {}, `and ${more} more owners`));
    byId("memory-tree").replaceChildren(...(rows.length ? rows : [el("li", { class: "hint" }, "Nothing is in memory.")]));
  }

  // Only cells that have changed are touched.
  drawMap({ pages_per_cell: per, cells, more_free: more }) {
    const scale = per === 1 ? "Each square is a page, with the number of its owners." : `Each square is ${per} pages, and shows most of them.`;
    byId("memory-scale").textContent = more ? `${scale} ${more} more pages are free.` : scale;
    const looks = cells.flatMap(([kind, owners, count]) => Array(count).fill(`${kind} ${owners}`));
    while (this.map.children.length > looks.length) this.map.lastChild.remove();
    while (this.map.children.length < looks.length) this.map.append(el("span"));
    looks.forEach((look, place) => {
      if (look === this.drawn[place]) return;
      const [kind, owners] = look.split(" "), cell = this.map.children[place];
      cell.className = `cell ${kind}`;
      cell.textContent = owners > 1 ? owners : "";
      cell.title = `${per === 1 ? "page" : "pages from"} ${place * per}: ${owners > 1 ? `${owners} owners, ` : ""}${KINDS[kind]}`;
    });
    this.drawn = looks;
  }
}

function line({ level, pages, text, looks }) {
  const strip = el("span", { class: "strip", "aria-hidden": "true" });
  const total = looks.reduce((sum, [, , count]) => sum + count, 0), scale = Math.min(1, WIDEST / total);
  for (const [kind, , count] of looks) {
    const part = el("span", { class: `cell ${kind}` });
    part.style.width = `${count * scale * 0.4}rem`;
    strip.append(part);
  }
  const made = el("li", { title: pages ? `pages ${pages}` : null }, strip, text);
  made.style.marginInlineStart = `${level}rem`;
  return made;
}
