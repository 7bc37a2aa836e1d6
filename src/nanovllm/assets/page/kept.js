// The KV of chats, kept on the server as chunks: one for the end of each branch. Branches share the pages of what they share.

import { call } from "./api.js";

const LEFT = "forget"; // names of chunks that could not be deleted yet

export const nameOf = (id) => `chat-${id}`;
export const idOf = (name) => /^chat-([0-9a-f]{24})$/.exec(name)?.[1];

const path = (name, more = "") => `v1/chunks/${encodeURIComponent(name)}${more}`;
const quietly = (asked) => asked.catch((error) => error);

// A reply goes on from messages: the chunk of the last one that has one is loaded from its file if it is not in memory.
export async function ready(messages, signal) {
  const name = messages.findLast((node) => node.kept)?.kept;
  if (!name) return;
  const found = await quietly(call(path(name), { signal }));
  if (found.status === 404) await quietly(call(path(name, "/load"), { method: "POST", body: {}, signal }));
}

// A reply has ended: its chunk goes into a file, where the server has files, and holds what the chunks of the messages before it held.
export async function settle(messages, keep) {
  const node = messages.at(-1);
  if (!node.kept) return;
  await quietly(call(path(node.kept, "/save"), { method: "POST", body: {} }));
  forget(messages.slice(0, -1), keep);
}

// The chunks of messages are deleted. `keep` stores a message that has changed.
export function forget(messages, keep) {
  const gone = messages.filter((node) => node.kept);
  localStorage.setItem(LEFT, JSON.stringify([...left(), ...gone.map((node) => node.kept)]));
  for (const node of gone) {
    node.kept = null;
    keep(node);
  }
  return sweep();
}

// What is to be deleted is asked for again when the server is there.
export async function sweep() {
  for (const name of left()) {
    const answers = [await quietly(call(path(name), { method: "DELETE" })), await quietly(call(path(name, "/save"), { method: "DELETE" }))];
    if (answers.some((answer) => answer.status === 0 || answer.status === 401 || answer.status >= 500)) return;
    localStorage.setItem(LEFT, JSON.stringify(left().filter((one) => one !== name)));
  }
}

const left = () => JSON.parse(localStorage.getItem(LEFT) ?? "[]");
