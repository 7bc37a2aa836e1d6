// The settings of the chat, the colours, and the API key.

import { key } from "./api.js";
import { byId } from "./dom.js";

const LAST = "settings"; // those of the chat that was changed last, which a new chat begins with

export const lastSettings = () => JSON.parse(localStorage.getItem(LAST) ?? "{}");

export class Settings {
  // `changed` gets the settings of the chat, `rekeyed` nothing.
  constructor(changed, rekeyed) {
    this.dialog = byId("settings-dialog");
    this.fields = [...this.dialog.querySelectorAll("[name]")];
    for (const field of this.fields) {
      field.addEventListener("change", () => {
        if (!field.checkValidity()) return field.reportValidity();
        const settings = (this.held = this.values());
        localStorage.setItem(LAST, JSON.stringify(settings));
        changed(settings);
      });
    }
    const theme = byId("theme"), keep = byId("keep-key"), field = byId("key");
    theme.value = document.documentElement.dataset.theme;
    theme.addEventListener("change", () => {
      localStorage.setItem("theme", theme.value);
      document.documentElement.dataset.theme = theme.value;
    });
    field.value = key.value;
    keep.checked = key.kept;
    for (const one of [field, keep]) {
      one.addEventListener("change", () => {
        key.set(field.value.trim(), keep.checked);
        rekeyed();
      });
    }
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault(); // closing gives the focus back to a button, which the key would press
      this.dialog.close();
    });
    byId("settings-close").addEventListener("click", () => {
      const wrong = this.fields.find((field) => !field.checkValidity());
      if (wrong) wrong.reportValidity();
      else this.dialog.close();
    });
    this.dialog.addEventListener("close", () => this.fields.some((field) => !field.checkValidity()) && this.show(this.held)); // by Escape
    byId("settings").addEventListener("click", () => this.open());
  }

  open(field = null) {
    if (!this.dialog.open) this.dialog.showModal();
    if (field) byId(field).focus();
  }

  show(settings) {
    this.held = settings;
    for (const field of this.fields) {
      if (field.type === "checkbox") field.checked = settings[field.name] === true;
      else field.value = settings[field.name] ?? "";
    }
  }

  values() {
    const found = {};
    for (const field of this.fields) {
      if (field.type === "checkbox") {
        if (field.checked) found[field.name] = true;
      } else if (field.value.trim()) found[field.name] = field.type === "number" ? Number(field.value) : field.value;
    }
    return found;
  }
}
