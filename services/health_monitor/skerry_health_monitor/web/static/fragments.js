// Fragments: version, age, and their rounds of late on the same stretch of time as the lanes.
import { $, canvas, colour, el, Rows, say } from "./dom.js";
import { age, count, duration } from "./format.js";
import { reach } from "./lanes.js";
import { leave, listen, now, store } from "./store.js";

const KEPT_S = 900;
const FLASH_S = 4; // more often, and it would always shine
const past = new Map(); // fragment -> Map(version -> [opened_s, closed_s])
let colours = {};

class Row {
  constructor(key) {
    this.key = key;
    this.version = el("b");
    this.age = el("span");
    this.adopted = el("small");
    this.strip = el("canvas", { "aria-hidden": "true" });
    this.node = el("li", { class: "fragment" }, el("span", {}, `f${key}`), el("span", { class: "version" }, this.version), this.strip, this.age, el("span", {}, this.adopted));
  }

  show(f, at, expected) {
    if (this.shown !== undefined && this.shown !== f.version && expected > FLASH_S) {
      this.node.classList.remove("fresh");
      void this.node.offsetWidth; // begins the animation anew
      this.node.classList.add("fresh");
    }
    this.shown = f.version;
    say(this.version, f.version ? `v${count(f.version)}` : "–");
    const old = f.closed_s === null ? null : at - f.closed_s;
    say(this.age, old === null ? "–" : age(old));
    this.age.classList.toggle("aged", old !== null && expected > 0 && old > Math.max(5, 4 * expected));
    say(this.adopted, f.closed_s ? `${f.adopted}/${store.run.learners ?? 0}` : "");
    this.node.title = `fragment ${this.key}: ${count(f.parameters)} parameters, version ${f.version}${f.closed_s ? ` since ${age(old)}, adopted by ${f.adopted} of ${store.run.learners}` : ""}`;
  }

  draw(end) {
    const { context: c, width, height } = canvas(this.strip);
    if (!width) return;
    const span = reach(), x = (at) => ((at - end + span) / span) * width;
    c.fillStyle = colours.faint;
    c.fillRect(0, height / 2 - 0.5, width, 1);
    c.fillStyle = colours.sea;
    for (const [opened, closed] of past.get(Number(this.key))?.values() ?? []) {
      if (x(closed) < 0) continue;
      c.fillRect(x(opened), height * 0.15, Math.max(1.5, x(closed) - x(opened)), height * 0.7);
    }
    const open = store.open.get(this.key);
    if (open) {
      c.fillStyle = colours.stone;
      c.fillRect(Math.max(0, x(open.opened_s)), height * 0.3, Math.max(1.5, width - x(open.opened_s)), height * 0.4);
    }
  }
}

const rows = new Rows($("fragment-rows"), (key) => new Row(key));

function remember() {
  const oldest = now() - KEPT_S;
  for (const r of store.rounds.values()) {
    let held = past.get(r.fragment);
    if (!held) past.set(r.fragment, (held = new Map()));
    if (!held.has(r.version) && r.closed_s > oldest) held.set(r.version, [r.opened_s, Math.max(r.closed_s, r.stored_s)]);
  }
  for (const held of past.values()) {
    for (const [version, [, closed]] of held) {
      if (closed >= oldest) break;
      held.delete(version);
    }
  }
}

export function tick() {
  const at = now();
  const keys = [...store.fragments.keys()];
  const expected = (store.run.round_gap_s ?? 0) * keys.length;
  rows.show(keys);
  for (const key of keys) {
    const row = rows.rows.get(key);
    row.show(store.fragments.get(key), at, store.run.finished ? 0 : expected);
    row.draw(at);
  }
  say($("fragments-note"), keys.length ? `version, age, adopted by${expected ? ` · each about every ${duration(expected)}` : ""}` : "");
}

export function paint() {
  colours = { faint: colour("line"), sea: colour("sea"), stone: colour("stone") };
  tick();
}

leave(() => past.clear());
listen(["rounds"], remember, true); // the store lets rounds go before a hidden page is seen
listen(["fragments", "open", "rounds", "facts"], tick);
