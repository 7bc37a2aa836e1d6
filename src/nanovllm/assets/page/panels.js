// The panels beside the chat, of which one at a time is open.

export class Panels {
  // Each has its panel, the button that opens and closes it, the button in it that closes it, and what happens when it has opened.
  constructor(all) {
    this.all = all;
    for (const { panel, button, close } of all) {
      button.addEventListener("click", () => this.toggle(panel));
      close.addEventListener("click", () => {
        this.toggle(panel);
        button.focus();
      });
    }
  }

  toggle(chosen) {
    for (const { panel, button, opened } of this.all) {
      panel.hidden = panel !== chosen || !panel.hidden;
      button.setAttribute("aria-expanded", String(!panel.hidden));
      if (!panel.hidden) opened();
    }
  }
}
