// The chunk files on the server: each is loaded or deleted, and one that cannot be loaded says why.

import { call } from "./api.js";
import { button, byId, el } from "./dom.js";
import { idOf } from "./kept.js";
import { amount } from "./units.js";

export class Saved {
  // `act` sends a request for a name, `doing` runs it and shows its error.
  constructor({ act, doing }) {
    Object.assign(this, { act, doing });
    this.part = byId("saved");
  }

  // `most` is how many files there may be. A server without a folder for files allows none, and nothing is shown.
  async refresh(most, chunks) {
    this.part.hidden = !most;
    if (!most) return;
    const { data, has_more: more } = await (await call("v1/saved_chunks")).json();
    const own = data.filter(({ name }) => !idOf(name ?? "")), ofChats = data.length - own.length; // those of chats come and go with the chats
    byId("saved-list").replaceChildren(...own.map((file) => this.line(file, chunks)));
    const of = ofChats ? `, ${ofChats} of them of chats` : "";
    byId("saved-room").textContent = more ? `The newest ${data.length} files${of}. There are more.` : `${data.length} of ${most} files${of}`;
  }

  line({ name, tokens, bytes, saved, error }, chunks) {
    const figures = [tokens === null ? "" : `${tokens} tokens`, amount(bytes), new Date(saved * 1000).toLocaleString()].filter(Boolean);
    const parts = [el("strong", {}, name ?? "A chunk whose name is not known"), el("span", { class: "told" }, figures.join(" · "))];
    if (error) parts.push(el("span", { class: "told error" }, error.message));
    return el("li", { "data-name": name }, ...parts, el("span", {}, ...(name === null ? [] : this.buttons(name, error, chunks.has(name)))));
  }

  buttons(name, error, inMemory) {
    const load = button("Load", () => this.doing(() => this.act("POST", name, "/load", {})), { "aria-label": `Load ${name}`, disabled: inMemory });
    const remove = button("Delete", () => this.doing(() => this.act("DELETE", name, "/save")), { "aria-label": `Delete the file of ${name}` });
    return error ? [remove] : [load, remove];
  }
}
