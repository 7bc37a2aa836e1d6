// Whether the server is there and takes the key.

import { call } from "./api.js";

const SOON = 1500, LATER = 15_000; // milliseconds between two looks while it is gone, and while it is there

export class Connection {
  // `told` gets "here" and the model's name, "gone" and why, or "key".
  constructor(told) {
    this.told = told;
    this.look();
  }

  async look() {
    clearTimeout(this.timer);
    const turn = (this.turn = (this.turn ?? 0) + 1);
    let state, detail;
    try {
      const models = await (await call("v1/models")).json();
      [state, detail] = ["here", models.data[0].id];
    } catch (error) {
      [state, detail] = error.status === 401 ? ["key", error.message] : ["gone", error.message];
    }
    if (turn !== this.turn) return;
    this.told(state, detail);
    if (state !== "key") this.timer = setTimeout(() => this.look(), state === "here" ? LATER : SOON); // a wrong key stays wrong
  }
}
