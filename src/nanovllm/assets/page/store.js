// Chats in IndexedDB. Every message is a record of its own and a chat's fields are changed one by one, so tabs overwrite nothing of one
// another's. They tell each other what has changed.

const NAME = "nanovllm";

export class Store extends EventTarget {
  static async open() {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => {
      asked.result.createObjectStore("chats", { keyPath: "id" });
      asked.result.createObjectStore("nodes", { keyPath: "id" }).createIndex("chat", "chat");
    };
    return new Store(await result(asked));
  }

  constructor(db) {
    super();
    this.db = db;
    this.channel = new BroadcastChannel(NAME);
    this.channel.onmessage = ({ data }) => this.dispatchEvent(new CustomEvent("changed", { detail: data }));
  }

  chats() {
    return result(this.db.transaction("chats").objectStore("chats").getAll());
  }

  chat(id) {
    return result(this.db.transaction("chats").objectStore("chats").get(id));
  }

  nodes(chat) {
    return result(this.db.transaction("nodes").objectStore("nodes").index("chat").getAll(chat));
  }

  node(id) {
    return result(this.db.transaction("nodes").objectStore("nodes").get(id));
  }

  async everything() {
    const at = this.db.transaction(["chats", "nodes"]);
    const [chats, nodes] = await Promise.all([result(at.objectStore("chats").getAll()), result(at.objectStore("nodes").getAll())]);
    return { chats, nodes };
  }

  async addChat(chat) {
    await this.write((chats) => chats.put(chat));
    this.tell({ chat: chat.id });
  }

  async changeChat(id, fields) {
    await this.write(async (chats) => {
      const chat = await result(chats.get(id));
      if (chat) chats.put({ ...chat, ...fields });
    });
    this.tell({ chat: id, fields: true });
  }

  // A message of a chat that another tab has deleted is not written.
  async putNode(node) {
    const copied = structuredClone(node);
    await this.write(async (chats, nodes) => {
      if (await result(chats.get(node.chat))) nodes.put(copied);
    });
    this.tell({ chat: node.chat, node: node.id });
  }

  async deleteChat(id) {
    await this.write(async (chats, nodes) => {
      chats.delete(id);
      for (const key of await result(nodes.index("chat").getAllKeys(id))) nodes.delete(key);
    });
    this.tell({ chat: id });
  }

  // What is here already stays as it is.
  async addAbsent({ chats, nodes }) {
    await this.write(async (into, below) => {
      const here = new Set(await result(into.getAllKeys())), known = new Set(await result(below.getAllKeys()));
      for (const chat of chats) if (!here.has(chat.id)) into.put(chat);
      for (const node of nodes) if (!known.has(node.id)) below.put(node);
    });
    this.tell({});
  }

  async write(run) {
    const at = this.db.transaction(["chats", "nodes"], "readwrite");
    const done = new Promise((resolve, reject) => {
      at.oncomplete = resolve;
      at.onerror = at.onabort = () => reject(at.error);
    });
    await Promise.all([run(at.objectStore("chats"), at.objectStore("nodes")), done]);
  }

  tell(change) {
    this.channel.postMessage(change);
  }
}

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
