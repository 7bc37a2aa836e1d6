// A conversation is a tree of messages. A branch is the path from its root to one message.

export class Tree {
  constructor(nodes = []) {
    this.nodes = new Map();
    this.below = new Map(); // the ids of the answers to a message, by its id; those of first messages by null
    for (const node of [...nodes].sort(before)) this.put(node);
  }

  put(node) {
    if (!this.nodes.has(node.id)) {
      const ids = this.below.get(node.parent) ?? [];
      let at = ids.length;
      while (at > 0 && before(node, this.nodes.get(ids[at - 1])) < 0) at--;
      ids.splice(at, 0, node.id);
      this.below.set(node.parent, ids);
    }
    this.nodes.set(node.id, node);
  }

  get(id) {
    return this.nodes.get(id);
  }

  children(id) {
    return this.below.get(id) ?? [];
  }

  siblings(id) {
    return this.children(this.nodes.get(id).parent);
  }

  path(id) {
    const found = [];
    for (let node = this.nodes.get(id); node; node = this.nodes.get(node.parent)) found.push(node);
    return found.reverse();
  }

  // The end of the branch that went on last.
  leaf(id) {
    let at = id ?? null;
    for (let ids; (ids = this.children(at)).length; ) at = ids.at(-1);
    return at;
  }
}

function before(a, b) {
  return a.created - b.created || (a.id < b.id ? -1 : 1);
}
