// The shelf: chunks on the server, and those that stand before the chat, in their order.

import { call } from "./api.js";
import { button, byId, el } from "./dom.js";
import { idOf } from "./kept.js";
import { Saved } from "./saved.js";

const KIND = "application/x-nanovllm-chunk"; // what is dragged
const MOST_BYTES = 8 << 20; // of a file that becomes a chunk

export class Shelf {
  // `used` gives the names before the chat, `use` sets them, `said` shows an error.
  constructor({ used, use, said }) {
    Object.assign(this, { used, use, said });
    this.chunks = new Map();
    this.listed = false; // whether the server has told its chunks
    this.panel = byId("shelf");
    this.files = 0; // how many the server allows
    this.saved = new Saved({ act: this.act, doing: (run) => this.doing(run) });
    byId("chunk-make").addEventListener("click", () => this.doing(() => this.make(byId("chunk-name").value.trim(), byId("chunk-text").value)));
    byId("chunk-file").addEventListener("change", ({ target }) => this.doing(() => this.file(target.files[0])));
    this.panel.addEventListener("dragover", (event) => event.preventDefault());
    this.panel.addEventListener("drop", (event) => {
      event.preventDefault();
      const { dataTransfer: dropped } = event, into = event.target.closest("#used");
      if (dropped.files.length) return this.doing(() => this.file(dropped.files[0]));
      const name = dropped.getData(KIND);
      if (name && into) return this.put(name, [...byId("used").children].indexOf(event.target.closest("li")), dropped.getData(`${KIND}-from`));
      if (!name && dropped.getData("text/plain")) byId("chunk-text").value = dropped.getData("text/plain");
    });
  }

  async doing(run) {
    this.panel.setAttribute("aria-busy", "true");
    try {
      await run();
      this.said("");
    } catch (error) {
      this.said(error.message);
    }
    this.panel.setAttribute("aria-busy", "false");
    await this.refresh();
  }

  async make(name, text) {
    if (!name || !text) throw new Error("A chunk needs a name and a text.");
    await call("v1/chunks", { method: "POST", body: { name, text } });
    byId("chunk-text").value = byId("chunk-name").value = "";
  }

  async file(file) {
    byId("chunk-file").value = "";
    if (!file) return;
    if (file.size > MOST_BYTES) throw new Error(`The file has ${file.size} bytes; a chunk may come from ${MOST_BYTES}.`);
    const name = file.name.replace(/\.\w+$/, "").replace(/[^\w-]+/g, "-").slice(0, 64);
    await this.make(name, await file.text());
  }

  act(method, name, path = "", body = undefined) {
    return call(`v1/chunks/${encodeURIComponent(name)}${path}`, { method, body });
  }

  // A chunk at a place of the row; from a place, if it was moved.
  put(name, place, from = "") {
    const row = [...this.used()];
    if (from !== "") row.splice(Number(from), 1);
    row.splice(place < 0 ? row.length : place, 0, name);
    this.change(row);
  }

  change(row) {
    this.use(row);
    this.draw();
  }

  async refresh() {
    if (this.panel.hidden) return;
    try {
      const found = await (await call("v1/chunks")).json();
      this.chunks = new Map(found.data.map((chunk) => [chunk.name, chunk]));
      this.listed = true;
      const { pages, chunks, files } = found.limits, chats = found.data.filter(({ name }) => idOf(name)).length;
      const of = chats ? `, ${chats} of them of chats` : "";
      byId("shelf-room").textContent = `${found.data.length} of ${chunks} chunks${of}, ${found.pages} of ${pages} pages of ${found.limits.page_size} tokens`;
      this.files = files;
      this.draw();
      await this.saved.refresh(files, this.chunks);
    } catch (error) {
      this.said(error.message);
      this.draw();
    }
  }

  draw() {
    const own = [...this.chunks.values()].filter(({ name }) => !idOf(name)); // those of chats are kept and deleted with the chats
    byId("chunk-list").replaceChildren(...own.map((chunk) => this.line(chunk)));
    const row = this.used(), known = row.map((name) => this.chunks.get(name)), tokens = known.reduce((sum, one) => sum + (one?.tokens ?? 0), 0);
    byId("used").replaceChildren(...row.map((name, place) => this.usedLine(name, place, row)));
    const exact = row.length < 2 && known.every((one) => one?.exact);
    const told = this.listed ? `${tokens} tokens, ${exact ? "exact" : "approximate: chunks in a row did not see each other"}` : "";
    byId("used-told").textContent = row.length ? told : "None. Press Use, or drag a chunk here.";
  }

  line({ name, tokens, pages, exact }) {
    const told = el("span", { class: "told" }, `${tokens} tokens · ${pages} ${pages === 1 ? "page" : "pages"} · ${exact ? "exact" : "approximate"}`);
    const buttons = [
      button("Use", () => this.put(name, -1), { "aria-label": `Use ${name}` }),
      ...(this.files ? [button("Save", () => this.doing(() => this.act("POST", name, "/save", {})), { "aria-label": `Save ${name} to a file` })] : []),
      button("Delete", () => this.doing(() => this.act("DELETE", name)), { "aria-label": `Delete ${name}` }),
    ];
    return this.dragged(el("li", { "data-name": name }, el("strong", {}, name), told, el("span", {}, ...buttons)), name);
  }

  usedLine(name, place, row) {
    const move = (label, words, to) => button(label, () => this.put(name, to, String(place)), { "aria-label": `${words} ${name}`, disabled: to < 0 || to >= row.length });
    const remove = button("✕", () => this.change(row.filter((_, other) => other !== place)), { "aria-label": `Do not use ${name}` });
    const missing = this.listed && !this.chunks.has(name) ? " (not on the server)" : "";
    return this.dragged(el("li", { "data-name": name }, el("strong", {}, name + missing), el("span", {}, move("↑", "Before:", place - 1), move("↓", "After:", place + 1), remove)), name, place);
  }

  dragged(item, name, from = "") {
    item.draggable = true;
    item.addEventListener("dragstart", ({ dataTransfer }) => {
      dataTransfer.setData(KIND, name);
      dataTransfer.setData(`${KIND}-from`, String(from));
    });
    return item;
  }
}
