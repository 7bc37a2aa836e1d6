// One reply: its request, and what comes of it, written into a message.

import { ApiError, events } from "./api.js";
import { ready } from "./kept.js";

const numbers = ["temperature", "top_p", "max_tokens"];

export function request(path, { settings, chunks = [] }, keep) {
  const body = { messages: path.map(({ role, content, reasoning }) => (reasoning ? { role, content, reasoning_content: reasoning } : { role, content })) };
  if (settings.system) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of numbers) if (typeof settings[name] === "number") body[name] = settings[name];
  if (chunks.length) body.chunks = chunks;
  if (settings.keep && chunks.length < 2) body.keep = keep; // after chunks in a row KV is approximate, and not found by its text
  if (settings.thinking === "off") body.reasoning_effort = "none";
  if (settings.thinking === "on") body.chat_template_kwargs = { enable_thinking: true };
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

// Fills a message while its reply streams. `changed` is called after each arrival. It never throws: an error is a field of the message.
export async function fill(node, messages, body, signal, changed) {
  const began = performance.now();
  let first = null, last = null, pieces = 0, early = 0; // early: pieces that came with the first
  try {
    if (body.keep) await ready(messages, signal);
    for await (const some of answered(node, body, signal)) {
      for (const event of some) {
        if (event.error) throw new ApiError(event.error.message);
        node.model = event.model;
        const [choice] = event.choices;
        const { content = "", reasoning_content: reasoning = "" } = choice?.delta ?? {};
        if (content || reasoning) {
          last = performance.now();
          first ??= last;
          pieces++;
          node.content += content;
          node.reasoning += reasoning;
        }
        if (choice?.finish_reason) node.finish = choice.finish_reason;
        if (event.nanovllm?.chunks) node.after = { chunks: event.nanovllm.chunks.length, exact: event.nanovllm.exact };
        if (event.nanovllm?.kept) node.kept = event.nanovllm.kept.name;
        if (event.nanovllm?.keep_error) node.unkept = event.nanovllm.keep_error;
        if (event.usage) node.usage = counts(event.usage);
      }
      early ||= pieces;
      changed();
    }
  } catch (error) {
    node.finish = error.name === "AbortError" ? "stopped" : "error";
    if (node.finish === "error") [node.error, node.status] = [error.message, error.status ?? 0];
  }
  node.finish ??= "stop";
  Object.assign(node, { pieces, early });
  if (first !== null) Object.assign(node, { wait: (first - began) / 1e3, seconds: (last - first) / 1e3 });
  changed();
}

// The events of the reply. If the server has no room for its chunk, it comes without one.
async function* answered(node, body, signal) {
  try {
    yield* events("v1/chat/completions", body, signal);
  } catch (error) {
    if (!body.keep || error.code !== "chunk_limit") throw error;
    node.unkept = error.message;
    delete body.keep;
    yield* events("v1/chat/completions", body, signal);
  }
}

function counts(usage) {
  return { prompt: usage.prompt_tokens, reused: usage.prompt_tokens_details?.cached_tokens ?? 0, completion: usage.completion_tokens };
}

// What is told under a reply.
export function figures(node) {
  const parts = [], tokens = node.usage?.completion ?? node.pieces;
  if (tokens) parts.push(`${node.usage ? "" : "about "}${tokens} tokens`);
  if (node.pieces > node.early && node.seconds > 0) {
    const after = tokens * (1 - node.early / node.pieces); // tokens that came after the first arrival
    parts.push(`${(after / node.seconds).toFixed(1)} a second`);
  }
  if (node.wait !== undefined) parts.push(`first after ${node.wait.toFixed(2)} s`);
  if (node.usage) parts.push(`${node.usage.reused} of ${node.usage.prompt} prompt tokens reused`);
  if (node.after) parts.push(`after ${node.after.chunks === 1 ? "a chunk" : `${node.after.chunks} chunks`}, ${node.after.exact ? "exact" : "approximate"}`);
  if (node.kept) parts.push("kept on the server");
  if (node.unkept) parts.push(`not kept: ${node.unkept}`);
  const ends = { stopped: "stopped", length: "the length was reached", edited: "written by hand", error: "not complete" };
  if (ends[node.finish]) parts.push(ends[node.finish]);
  return parts.join(" · ");
}
