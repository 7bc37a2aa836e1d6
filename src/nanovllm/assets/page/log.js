// The branch that is shown, as a list of messages. Messages that stay on the page are not made again.

import { oncePerFrame } from "./dom.js";
import { Message } from "./message.js";

const NEAR = 60; // pixels from the end within which the page follows a reply

export class Log {
  constructor(element, act) {
    this.element = element;
    this.act = act;
    this.shown = new Map(); // messages by id
    this.changed = new Set(); // ids of messages whose replies have grown
    this.draw = oncePerFrame(() => this.flush());
    this.running = () => false;
  }

  show(tree, leaf) {
    const path = tree.path(leaf), wanted = new Set(path.map((node) => node.id));
    const follow = this.atEnd();
    for (const [id, message] of this.shown) {
      if (wanted.has(id)) continue;
      message.element.remove();
      this.shown.delete(id);
    }
    let previous = null;
    for (const node of path) {
      let message = this.shown.get(node.id);
      if (!message) this.shown.set(node.id, (message = new Message(node, this.act)));
      message.update(node, this.running(node.id));
      message.place(tree.siblings(node.id));
      const place = previous ? previous.nextSibling : this.element.firstChild;
      if (place !== message.element) this.element.insertBefore(message.element, place);
      previous = message.element;
    }
    this.busy();
    if (follow) this.toEnd();
  }

  // A reply has grown: it is drawn with the next frame.
  grow(node) {
    if (!this.shown.has(node.id)) return;
    this.changed.add(node.id);
    this.draw();
  }

  // A reply has ended: it is drawn now, because a hidden page gets no frames.
  end(node) {
    this.changed.add(node.id);
    this.flush();
    this.busy();
  }

  flush() {
    const follow = this.atEnd();
    for (const id of this.changed) {
      const message = this.shown.get(id);
      message?.update(message.node, this.running(id));
    }
    this.changed.clear();
    if (follow) this.toEnd();
  }

  // Screen readers read a reply when it is complete.
  busy() {
    this.element.setAttribute("aria-busy", String([...this.shown.keys()].some(this.running)));
  }

  atEnd() {
    return this.element.scrollHeight - this.element.scrollTop - this.element.clientHeight < NEAR;
  }

  toEnd() {
    this.element.scrollTop = this.element.scrollHeight;
  }
}
