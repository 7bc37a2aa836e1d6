// Who owns the engine's KV pages, live, from `/metrics`.

import { call } from "./api.js";
import { el } from "./dom.js";

const OWNERS = { running: "running requests", chunks: "chunks", index: "earlier prompts and replies, for reuse", free: "nobody" };
const EVERY = 1000; // milliseconds

export function read(text) {
  const found = new Map();
  for (const [, labels, count] of text.matchAll(/^nanovllm_pages\{(.*)\} (\S+)$/gm)) {
    const owner = /(?:^|,)owner="(\w+)"/.exec(labels)?.[1];
    if (Object.hasOwn(OWNERS, owner)) found.set(owner, Number(count));
  }
  return found;
}

export class Pages {
  // Looks while `shown()` holds.
  constructor(into, shown) {
    this.shown = shown;
    this.parts = new Map(Object.keys(OWNERS).map((owner) => [owner, el("span", { class: `part ${owner}` })]));
    this.counts = new Map(Object.keys(OWNERS).map((owner) => [owner, el("span")]));
    const legend = Object.entries(OWNERS).map(([owner, words]) => el("li", {}, el("span", { class: `mark ${owner}` }), this.counts.get(owner), ` ${words}`));
    into.replaceChildren(el("div", { class: "bar", "aria-hidden": "true" }, ...this.parts.values()), el("ul", { class: "legend" }, ...legend));
  }

  async look() {
    clearTimeout(this.timer);
    if (!this.shown()) return;
    const counts = await call("metrics").then((answer) => answer.text()).then(read, () => new Map());
    for (const [owner, count] of counts) {
      this.parts.get(owner).style.flexGrow = count;
      this.counts.get(owner).textContent = count;
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.look(), EVERY);
  }
}
