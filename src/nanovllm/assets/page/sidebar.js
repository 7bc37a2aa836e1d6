// The list of chats.

import { button, el } from "./dom.js";

export function draw(into, chats, open, act) {
  const sorted = [...chats].sort((a, b) => b.updated - a.updated);
  into.replaceChildren(...sorted.map((chat) => {
    const choose = button(chat.title, () => act.open(chat.id), { class: "chat", "aria-current": chat.id === open ? "page" : null });
    const rename = button("✎", () => act.rename(chat), { "aria-label": `Rename ${chat.title}`, title: "Rename" });
    const remove = button("✕", () => act.remove(chat), { "aria-label": `Delete ${chat.title}`, title: "Delete" });
    return el("li", { "data-id": chat.id }, choose, rename, remove);
  }));
}
