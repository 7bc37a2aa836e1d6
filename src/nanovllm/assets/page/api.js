// Requests to the server that the page comes from.

export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status; // 0: the server could not be reached, or the reply ended with an error
    this.code = code; // what went wrong, in one word for programs
  }
}

// The key is forgotten with the tab, unless it is to be kept.
export const key = {
  get value() {
    return sessionStorage.getItem("key") ?? localStorage.getItem("key") ?? "";
  },
  get kept() {
    return localStorage.getItem("key") !== null;
  },
  set(value, kept) {
    sessionStorage.removeItem("key");
    localStorage.removeItem("key");
    if (value) (kept ? localStorage : sessionStorage).setItem("key", value);
  },
};

export async function call(path, { method = "GET", body, signal } = {}) {
  const headers = key.value ? { authorization: `Bearer ${key.value}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store" };
  let answer;
  try {
    answer = await fetch(new URL(path, document.baseURI), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!answer.ok) throw await reason(answer);
  return answer;
}

async function reason(answer) {
  try {
    const { message, code } = (await answer.json()).error;
    return new ApiError(message, answer.status, code);
  } catch {
    return new ApiError(`The server answered with status ${answer.status}.`, answer.status);
  }
}

// The events of a streamed answer, as many at a time as have come.
export async function* events(path, body, signal) {
  const answer = await call(path, { method: "POST", body, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", ended = false;
  for (;;) {
    const { done, value } = await read(reader);
    if (done) break;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    const found = parts.filter((part) => part.startsWith("data: ")).map((part) => part.slice(6));
    ended ||= found.includes("[DONE]");
    yield found.filter((data) => data !== "[DONE]").map((data) => JSON.parse(data));
  }
  if (!ended) throw new ApiError("The server ended before the reply did.");
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server broke.");
  }
}
