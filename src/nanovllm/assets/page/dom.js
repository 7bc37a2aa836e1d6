// Elements as values of functions. Text is always text: nothing here parses HTML.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function button(label, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, label);
}

export const byId = (id) => document.getElementById(id);

// Outside of HTTPS and this machine browsers offer no clipboard, but the old command works.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = el("textarea", { class: "hidden" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

export function copyButton(text) {
  const made = button("Copy", async () => {
    await copy(text());
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = "Copy"), 1200);
  });
  return made;
}

// Runs a function at most once a frame, and less often when it is slow, so that half of the time is left for everything else.
export function oncePerFrame(run) {
  let asked = false, free = 0;
  const frame = (now) => {
    if (now < free) return requestAnimationFrame(frame);
    asked = false;
    run();
    free = 2 * performance.now() - now;
  };
  return () => {
    if (!asked) requestAnimationFrame(frame);
    asked = true;
  };
}

// Randomness that pages without HTTPS have too.
export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
