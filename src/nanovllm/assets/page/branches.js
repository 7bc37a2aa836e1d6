// The whole tree of a conversation. Messages with one answer stand below each other, branches are indented.

import { button, el } from "./dom.js";

const SHOWN = 60; // characters of a message

export function draw(into, tree, leaf, show) {
  const current = new Set(tree.path(leaf).map((node) => node.id));
  const top = el("ul"), left = tree.children(null).map((id) => ({ id, list: top }));
  for (let place = 0; place < left.length; place++) {
    let { id, list } = left[place];
    const item = el("li");
    list.append(item);
    for (;;) {
      item.append(line(tree.get(id), current.has(id), show));
      const answers = tree.children(id);
      if (answers.length !== 1) {
        const inner = el("ul");
        if (answers.length) item.append(inner);
        left.push(...answers.map((one) => ({ id: one, list: inner })));
        break;
      }
      [id] = answers;
    }
  }
  into.replaceChildren(left.length ? top : el("p", { class: "hint" }, "Branches appear here when there are messages."));
}

function line(node, current, show) {
  const text = node.content.trim() || node.reasoning.trim() || "(empty)";
  const label = `${node.role === "user" ? "You" : "Reply"}: ${text.slice(0, SHOWN)}${text.length > SHOWN ? "…" : ""}`;
  const made = button(label, () => show(node.id), { class: `branch ${node.role}`, "data-id": node.id });
  if (current) made.setAttribute("aria-current", "true");
  return made;
}
