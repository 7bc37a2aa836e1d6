// All chats as one JSON file, and back.

import { el, newId } from "./dom.js";

const FORMAT = "nanovllm-chats", VERSION = 1;

export function save({ chats, nodes }) {
  const text = JSON.stringify({ format: FORMAT, version: VERSION, chats, nodes }, null, 1);
  const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href, download: `nanovllm-chats-${new Date().toISOString().slice(0, 10)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

// What a file holds, with the fields that are known and no others. It throws an error that says what is wrong.
export function read(text) {
  let given;
  try {
    given = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (given?.format !== FORMAT || given.version !== VERSION) throw new Error("The file holds no chats that were exported here.");
  const chats = list(given.chats).map((chat) => ({
    id: id(chat.id), title: string(chat.title), created: number(chat.created), updated: number(chat.updated),
    leaf: chat.leaf === null ? null : id(chat.leaf), settings: settings(chat.settings),
    chunks: (chat.chunks ?? []).map(id),
  }));
  const nodes = list(given.nodes).map((node) => ({
    id: id(node.id), chat: id(node.chat), parent: node.parent === null ? null : id(node.parent),
    role: node.role === "user" ? "user" : "assistant", content: string(node.content), reasoning: string(node.reasoning),
    created: number(node.created), model: optional(node.model, string), finish: optional(node.finish, string) ?? "stop",
    error: optional(node.error, string), status: optional(node.status, number), usage: optional(node.usage, usage),
    after: optional(node.after, (after) => ({ chunks: number(after.chunks), exact: after.exact === true })),
    pieces: optional(node.pieces, number), early: optional(node.early, number), wait: optional(node.wait, number) ?? undefined, seconds: optional(node.seconds, number) ?? undefined,
  }));
  check(chats, nodes);
  return { chats, nodes };
}

// Every message is in a chat, and going up from it leads to a first message of the same chat.
function check(chats, nodes) {
  const known = new Set(chats.map((chat) => chat.id)), byId = new Map(nodes.map((node) => [node.id, node])), good = new Set([null]);
  for (const node of nodes) {
    const way = new Set();
    let at = node.id;
    while (!good.has(at)) {
      const one = byId.get(at);
      if (!one || one.chat !== node.chat || !known.has(one.chat) || way.has(at)) throw new Error("A message of the file has no place in its chat.");
      way.add(at);
      at = one.parent;
    }
    if (at !== null && byId.get(at).chat !== node.chat) throw new Error("A message of the file has no place in its chat.");
    for (const one of way) good.add(one);
  }
}

const fail = (what) => {
  throw new Error(`The file is damaged: ${what}.`);
};
const list = (value) => (Array.isArray(value) && value.every((one) => one && typeof one === "object") ? value : fail("a list is missing"));
const string = (value) => (typeof value === "string" ? value : fail("a text is missing"));
const number = (value) => (Number.isFinite(value) ? value : fail("a number is missing"));
const id = (value) => (/^[\w-]{1,64}$/.test(string(value)) ? value : fail("an id is wrong"));
const optional = (value, reads) => (value === null || value === undefined ? null : reads(value));
const usage = (value) => ({ prompt: number(value.prompt), reused: number(value.reused), completion: number(value.completion) });

function settings(value) {
  const found = {};
  for (const name of ["temperature", "top_p", "max_tokens"]) if (Number.isFinite(value?.[name])) found[name] = value[name];
  if (value?.keep === true) found.keep = true;
  for (const name of ["system", "thinking"]) if (typeof value?.[name] === "string") found[name] = value[name];
  return found;
}

export const emptyChat = (settings) => ({ id: newId(), title: "New chat", created: Date.now(), updated: Date.now(), leaf: null, settings });
