// One message on the page.

import { button, copyButton, el } from "./dom.js";
import { Markdown } from "./markdown.js";
import { figures } from "./reply.js";

// `act` has what the buttons do: edit(node, text), again(node), show(id).
export class Message {
  constructor(node, act) {
    this.node = node;
    this.act = act;
    const mine = node.role === "user";
    this.text = mine ? el("div", { class: "plain" }) : new Markdown();
    this.body = el("div", { class: "body" }, mine ? this.text : this.text.element);
    this.thoughts = document.createTextNode("");
    this.thinking = el("details", { class: "thinking", hidden: true }, el("summary", {}, "Thinking"), el("div", { class: "plain" }, this.thoughts));
    this.error = el("p", { class: "error", hidden: true });
    this.figures = el("span", { class: "figures" });
    this.walk = el("span", { class: "walk", hidden: true });
    this.buttons = el("span", { class: "buttons" }, copyButton(() => this.node.content), button("Edit", () => this.edit()));
    if (!mine) this.buttons.append(button("Regenerate", () => this.act.again(this.node)));
    this.foot = el("div", { class: "foot" }, this.walk, this.buttons, this.figures);
    const parts = mine ? [this.body, this.foot] : [this.thinking, this.body, this.error, this.foot];
    this.element = el("article", { class: `message ${node.role}`, "data-id": node.id, "aria-label": mine ? "You" : "Reply" }, ...parts);
  }

  // What the message says now. `running`: its reply is still coming.
  update(node, running) {
    this.node = node;
    if (node.role === "user") this.text.textContent = node.content;
    else this.text.set(node.content, !running);
    if (node.reasoning.length > this.thoughts.length && node.reasoning.startsWith(this.thoughts.data)) {
      this.thoughts.appendData(node.reasoning.slice(this.thoughts.length));
    } else if (node.reasoning !== this.thoughts.data) this.thoughts.data = node.reasoning;
    this.thinking.hidden = !node.reasoning.trim();
    this.element.classList.toggle("running", running);
    this.element.classList.toggle("empty", running && !node.content && !node.reasoning);
    this.error.hidden = !node.error;
    this.error.textContent = node.error ?? "";
    this.figures.textContent = running || node.role === "user" ? "" : node.finish === null ? "not finished" : figures(node);
    this.buttons.hidden = running;
  }

  // Which of the messages at this place it is.
  place(siblings) {
    const at = siblings.indexOf(this.node.id);
    this.walk.hidden = siblings.length < 2;
    if (this.walk.hidden) return this.walk.replaceChildren();
    const step = (label, name, to) => button(label, () => this.act.show(siblings[to]), { "aria-label": name, disabled: siblings[to] === undefined });
    this.walk.replaceChildren(
      step("‹", "The branch before", at - 1), el("span", {}, `${at + 1}/${siblings.length}`), step("›", "The branch after", at + 1),
    );
  }

  edit() {
    if (this.editing) return;
    const field = el("textarea", { "aria-label": "The message, edited", rows: Math.min(20, this.node.content.split("\n").length + 1) });
    field.value = this.node.content;
    const end = () => {
      this.editing.remove();
      this.editing = null;
      this.body.hidden = this.foot.hidden = false;
    };
    const keep = () => {
      const text = field.value;
      end();
      if (text.trim() && text !== this.node.content) this.act.edit(this.node, text);
    };
    const save = button(this.node.role === "user" ? "Send" : "Keep", keep, { class: "save" });
    this.editing = el("div", { class: "editing" }, field, el("div", { class: "row" }, save, button("Cancel", end)));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) keep();
      if (event.key === "Escape") end();
      if (event.key === "Escape") event.stopPropagation();
    });
    this.body.hidden = this.foot.hidden = true;
    this.body.after(this.editing);
    field.focus();
  }
}
