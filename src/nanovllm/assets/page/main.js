// Joins the parts of the page.

import { draw as drawBranches } from "./branches.js";
import { Chat } from "./chat.js";
import { Connection } from "./connection.js";
import { byId } from "./dom.js";
import { forget, sweep } from "./kept.js";
import { Log } from "./log.js";
import { Memory } from "./memory.js";
import { Panels } from "./panels.js";
import { Settings, lastSettings } from "./settings.js";
import { Shelf } from "./shelf.js";
import { draw as drawChats } from "./sidebar.js";
import { Store } from "./store.js";
import { emptyChat, read, save } from "./transfer.js";

const TITLE = 60; // characters
const PHONE = matchMedia("(max-width: 700px)");
const text = byId("text"), notice = byId("notice"), panel = byId("panel"), sidebar = byId("sidebar");
const failed = (error) => say(`The chats of this browser cannot be used: ${error?.message ?? error}`);

const store = await Store.open().catch((error) => {
  failed(error);
  throw error;
});
const log = new Log(byId("log"), {
  edit: (node, edited) => chat.edit(node, edited),
  again: (node) => chat.again(node),
  show: (id) => chat.show(id),
});
const chat = new Chat(store, {
  failed,
  changed: draw,
  grown: (node) => log.grow(node),
  ended(node) {
    log.end(node);
    draw();
    shelf.refresh();
    if (node.finish === "error") connection.look();
  },
});
log.running = (id) => chat.running.has(id);
const settings = new Settings(
  (values) => {
    if (!chat.record) return;
    const kept = chat.record.settings.keep;
    chat.record.settings = values;
    if (kept && !values.keep) chat.forget().catch(failed);
    store.changeChat(chat.record.id, { settings: values }).catch(failed);
  },
  () => connection.look(),
);
let draft = []; // the chunks of a chat that has no message yet
const shelf = new Shelf({
  said: say,
  used: () => chat.record?.chunks ?? (chat.record ? [] : draft),
  use(names) {
    if (!chat.record) return (draft = names);
    chat.record.chunks = names;
    store.changeChat(chat.record.id, { chunks: names }).catch(failed);
  },
});
const memory = new Memory(async (id) => {
  const node = await store.node(id);
  return node && (await store.chat(node.chat))?.title;
});
const panels = new Panels([
  { panel: byId("panel"), button: byId("branches"), close: byId("panel-close"), opened: draw },
  { panel: shelf.panel, button: byId("chunks"), close: byId("shelf-close"), opened: () => shelf.refresh() },
  { panel: memory.panel, button: byId("memory-button"), close: byId("memory-close"), opened: () => memory.look() },
]);
const connection = new Connection((state, detail) => {
  byId("model").textContent = state === "here" ? detail : "";
  if (state === "here" && document.body.dataset.server !== state) {
    say("");
    sweep().catch(failed);
  }
  document.body.dataset.server = state;
  if (state === "gone") say(`${detail} The page looks for it again and again; nothing is lost.`);
  if (state === "key") {
    say("The server needs an API key, or the one that was given is wrong.");
    settings.open("key");
  }
});

function say(words) {
  notice.hidden = !words;
  if (notice.textContent !== words) notice.textContent = words;
}

// An error of what was done before is no longer of interest; that the server is gone is.
function quiet() {
  if (document.body.dataset.server === "here") say("");
}

function draw() {
  log.show(chat.tree, chat.leaf);
  byId("title").textContent = document.title = chat.record?.title ?? "New chat";
  byId("stop").hidden = !chat.replying;
  byId("send").hidden = chat.replying;
  if (!panel.hidden) drawBranches(byId("tree"), chat.tree, chat.leaf, (id) => chat.show(id));
}

async function drawList() {
  drawChats(byId("chats"), await store.chats(), chat.record?.id, {
    open: (id) => (location.hash = id),
    rename: (one) => rename(one.id, prompt("The title of the chat", one.title)),
    remove: (one) => confirm(`Delete the chat “${one.title}” with all of its branches?`) && remove(one.id),
  });
}

async function rename(id, title) {
  if (!title?.trim()) return;
  const fields = { title: title.trim() };
  if (chat.record?.id === id) Object.assign(chat.record, fields);
  await store.changeChat(id, fields);
  draw();
  await drawList();
}

async function remove(id) {
  for (const { node, stop } of chat.running.values()) if (node.chat === id) stop.abort();
  const nodes = await store.nodes(id);
  await store.deleteChat(id);
  forget(nodes, () => {}).catch(failed);
  if (chat.record?.id === id) location.hash = "";
  await drawList();
}

// The chat in the address, which reloading and the buttons of the browser keep.
async function openNamed() {
  quiet();
  const id = location.hash.slice(1), record = id ? await store.chat(id) : undefined;
  if (record?.id === chat.record?.id && record) return;
  chat.close();
  settings.show(record?.settings ?? lastSettings());
  if (record) await chat.open(record);
  draw();
  shelf.draw();
  log.toEnd();
  await drawList();
  if (PHONE.matches) toggleSidebar(false);
}

async function send() {
  const words = text.value;
  if (!words.trim() || chat.replying) return;
  quiet();
  text.value = "";
  grow();
  if (!chat.record) {
    const made = { ...emptyChat(settings.values()), chunks: draft, title: words.trim().split("\n", 1)[0].slice(0, TITLE) };
    chat.record = made;
    draft = [];
    await store.addChat(made);
    history.pushState(null, "", `#${made.id}`);
  }
  chat.send(words);
  log.toEnd();
  await drawList();
}

function toggleSidebar(open = sidebar.hidden) {
  sidebar.hidden = !open;
  byId("menu").setAttribute("aria-expanded", String(open));
}

function grow() {
  text.style.height = "auto";
  text.style.height = `${Math.min(text.scrollHeight + 2, innerHeight / 3)}px`;
}

// At once, so that what is written next is sent in it.
function newChat() {
  if (location.hash) history.pushState(null, "", location.pathname + location.search);
  openNamed().catch(failed);
  text.focus();
}

text.addEventListener("input", grow);
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send().catch(failed);
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send().catch(failed);
});
byId("stop").addEventListener("click", () => chat.stop());
byId("new").addEventListener("click", newChat);
byId("menu").addEventListener("click", () => toggleSidebar());
byId("export").addEventListener("click", async () => save(await store.everything()));
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (!file) return;
  try {
    await store.addAbsent(read(await file.text()));
    say("");
  } catch (error) {
    say(error.message);
  }
  target.value = "";
  await drawList();
});
document.addEventListener("keydown", (event) => {
  const pressed = event.key.toLowerCase(), command = event.ctrlKey || event.metaKey;
  const writing = /^(TEXTAREA|INPUT)$/.test(event.target.tagName) && event.target.value !== "";
  const does = () => {
    if (pressed === "escape" && chat.replying && !settings.dialog.open) return () => chat.stop();
    if (command && event.shiftKey && pressed === "o") return newChat;
    if (command && event.shiftKey && pressed === "e") return () => panels.toggle(panel);
    if (command && !event.shiftKey && pressed === "b") return toggleSidebar;
    if (event.altKey && pressed === "arrowleft" && !writing) return () => chat.walk(-1);
    if (event.altKey && pressed === "arrowright" && !writing) return () => chat.walk(1);
  };
  const found = does();
  if (!found) return;
  event.preventDefault();
  found();
});
document.addEventListener("visibilitychange", () => memory.look());
addEventListener("hashchange", () => openNamed().catch(failed));
store.addEventListener("changed", async ({ detail }) => {
  if (detail.node && detail.chat === chat.record?.id) return chat.heard(detail.node);
  if (detail.chat === chat.record?.id && detail.chat) {
    const record = await store.chat(detail.chat);
    if (!record) location.hash = "";
    else {
      Object.assign(chat.record, { title: record.title, settings: record.settings, chunks: record.chunks });
      settings.show(record.settings);
      draw();
      shelf.draw();
    }
  }
  if (!detail.node) await drawList();
});

PHONE.addEventListener("change", () => toggleSidebar(!PHONE.matches));
toggleSidebar(!PHONE.matches);
await openNamed();
text.focus();
