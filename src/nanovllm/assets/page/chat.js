// The chat that is open: its tree, the branch that is shown, and the replies that run.

import { newId } from "./dom.js";
import { forget, nameOf, settle } from "./kept.js";
import { fill, request } from "./reply.js";
import { Tree } from "./tree.js";

const SAVE_EVERY = 1000; // milliseconds, while a reply streams

export class Chat {
  // `changed` is called after every change of the tree or the branch, `grown` after every arrival, `ended` after the end of a reply.
  constructor(store, { changed, grown, ended, failed }) {
    Object.assign(this, { store, changed, grown, ended, failed });
    this.running = new Map(); // by the id of the reply: the message, and what stops it
    this.record = null;
    this.close();
  }

  close() {
    this.record = null;
    this.tree = new Tree();
    this.leaf = null;
  }

  async open(record) {
    const nodes = await this.store.nodes(record.id);
    this.record = record;
    this.tree = new Tree(nodes.map((node) => this.running.get(node.id)?.node ?? node));
    this.leaf = this.tree.get(record.leaf) ? record.leaf : this.tree.leaf();
    this.changed();
  }

  get replying() {
    return this.running.has(this.leaf);
  }

  // Another tab has changed a message of this chat.
  async heard(id) {
    if (this.running.has(id)) return;
    const node = await this.store.node(id);
    if (!node || node.chat !== this.record?.id || this.running.has(id)) return;
    const continues = node.parent === this.leaf && !this.tree.get(id);
    this.tree.put(node);
    if (continues) this.leaf = id;
    this.changed();
  }

  show(id) {
    this.leaf = this.tree.leaf(id);
    this.keepLeaf();
    this.changed();
  }

  send(text) {
    this.answer(this.add({ role: "user", content: text, parent: this.leaf, finish: "stop" }).id);
  }

  edit(node, text) {
    const made = this.add({ role: node.role, content: text, parent: node.parent, finish: node.role === "user" ? "stop" : "edited" });
    if (made.role === "user") return this.answer(made.id);
    this.keepLeaf();
    this.changed();
  }

  again(node) {
    this.answer(node.parent);
  }

  stop() {
    this.running.get(this.leaf)?.stop.abort();
  }

  // The branch before or after the shown one, at the last place where there are several.
  walk(step) {
    const forked = this.tree.path(this.leaf).findLast((node) => this.tree.siblings(node.id).length > 1);
    if (!forked) return;
    const siblings = this.tree.siblings(forked.id), next = siblings[siblings.indexOf(forked.id) + step];
    if (next) this.show(next);
  }

  add(fields) {
    const node = { id: newId(), chat: this.record.id, created: Date.now(), reasoning: "", error: null, usage: null, ...fields };
    this.tree.put(node);
    this.leaf = node.id;
    this.keep(node);
    return node;
  }

  async answer(parent) {
    const messages = this.tree.path(parent), stop = new AbortController();
    const node = this.add({ role: "assistant", content: "", parent, finish: null });
    const body = request(messages, this.record, nameOf(node.id));
    this.running.set(node.id, { node, stop });
    this.keepLeaf();
    this.changed();
    let saved = Date.now();
    await fill(node, messages, body, stop.signal, () => {
      this.grown(node);
      if (Date.now() - saved < SAVE_EVERY) return;
      saved = Date.now();
      this.keep(node);
    });
    this.running.delete(node.id);
    this.keep(node);
    this.ended(node);
    await settle([...messages, node], (one) => this.keep(one));
  }

  keep(node) {
    this.store.putNode(node).catch(this.failed);
  }

  // The chat's chunks on the server are deleted.
  forget() {
    return forget([...this.tree.nodes.values()], (node) => this.keep(node)).then(this.changed);
  }

  keepLeaf() {
    Object.assign(this.record, { leaf: this.leaf, updated: Date.now() });
    this.store.changeChat(this.record.id, { leaf: this.leaf, updated: this.record.updated }).catch(this.failed);
  }
}
