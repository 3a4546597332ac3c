// A lane per learner: what state it was in, and when its contributions were merged.
import { $, canvas, cell, colour, el, firstStop, mark, roving, Rows, say } from "./dom.js";
import { ago, count, loss, percent, whole, words } from "./format.js";
import { openLearner } from "./learner.js";
import { offer, picture } from "./save.js";
import { listen, now, store, touch } from "./store.js";

const FEW = 6;
const MANY = 24;
const ORDER = ["gone", "suspect", "catching_up", "starting", "training", "finished", "stopped"];
const list = $("lanes");
const chosen = { state: "", text: "", reach_s: 300 };
let colours = {};
let visible = new Set();

const seen = new IntersectionObserver((entries) => {
  for (const e of entries) {
    if (e.isIntersecting) visible.add(e.target.lane);
    else visible.delete(e.target.lane);
    if (e.isIntersecting) e.target.lane.draw();
  }
}, { rootMargin: "60px" });

export function stateOf(l) {
  if (l.phase === "stopped" || l.phase === "finished") return l.phase;
  return l.liveness === "alive" ? l.phase : l.liveness;
}

class Lane {
  constructor(name) {
    this.name = name;
    this.sign = el("i", { class: "sign" });
    this.title = el("b");
    this.start = el("small");
    this.strip = el("canvas", { "aria-hidden": "true" });
    this.state = el("span", { class: "hidden" });
    this.step = el("span");
    this.paceText = el("span");
    this.paceBar = el("i");
    this.loss = el("span");
    this.stale = el("span");
    this.goodput = el("span");
    this.last = el("span");
    this.button = el("button", { type: "button", class: "lane", "data-row": "", tabindex: "-1", onclick: () => openLearner(name) },
      el("span", { class: "who" }, this.sign, this.title, this.start, this.state), this.strip, cell("step", "step", this.step), cell("tokens per second", "pace", this.paceText, this.paceBar),
      cell("loss", "loss", this.loss), cell("stale by", "wide", this.stale), cell("goodput", "wide", this.goodput), cell("last merged", "wide", this.last));
    this.node = el("li", {}, this.button);
    this.button.lane = this;
    seen.observe(this.button);
  }

  gone() {
    seen.unobserve(this.button);
    visible.delete(this);
  }

  show(l, fastest) {
    const state = stateOf(l);
    mark(this.button, "state", state);
    say(this.title, l.name);
    say(this.start, `${l.incarnation > 1 ? `#${l.incarnation}` : ""}${l.quarantine ? " in quarantine" : ""}`);
    say(this.state, ` ${words(state)}`);
    say(this.step, l.heard ? whole(l.step) : "–");
    say(this.paceText, state === "training" || state === "suspect" ? count(l.tokens_per_s) : words(state));
    this.paceBar.style.width = state === "training" && fastest ? `${(100 * l.tokens_per_s) / fastest}%` : "0";
    say(this.loss, l.heard ? loss(l.loss, 2) : "–");
    say(this.stale, String(l.staleness));
    this.stale.classList.toggle("late", l.staleness > 0);
    say(this.goodput, l.heard ? percent(l.goodput) : "–");
    this.learner = l;
    this.tick(now());
  }

  tick(at) {
    const l = this.learner;
    if (!l) return;
    say(this.last, l.last ? ago(at - l.last[2]) : "–");
    this.button.title = `${l.name} on ${l.host || "?"}: ${words(stateOf(l))} (${l.reason}), heard ${ago(at - l.seen_s)}`;
  }

  draw() {
    const { context: c, width, height } = canvas(this.strip);
    if (!width || !this.learner) return;
    const end = now(), begin = end - chosen.reach_s, x = (at) => ((at - begin) / chosen.reach_s) * width;
    c.fillStyle = colours.faint;
    c.fillRect(0, height * 0.28, width, height * 0.44);
    const turns = store.lanes.get(this.name) ?? [];
    turns.forEach(([at, state], i) => {
      const from = Math.max(0, x(at)), to = i + 1 < turns.length ? x(turns[i + 1][0]) : width;
      if (to <= 0) return;
      c.fillStyle = colours[state] ?? colours.faint;
      c.globalAlpha = state === "training" ? 0.38 : 0.9;
      c.fillRect(from, height * 0.28, Math.max(1, to - from), height * 0.44);
    });
    c.globalAlpha = 1;
    for (const [at, late] of store.marks.get(this.learner.number) ?? []) {
      if (at < begin) continue;
      c.fillStyle = late ? colours.suspect : colours.training;
      c.fillRect(Math.round(x(at)), late ? 0 : height * 0.14, 1.5, late ? height : height * 0.72);
    }
  }
}

const rows = new Rows(list, (name) => new Lane(name));
const buttons = new Map();

function states(counts) {
  for (const state of ORDER) {
    let button = buttons.get(state);
    if (!button) {
      button = el("button", { type: "button", "aria-pressed": "false", onclick: () => {
        chosen.state = chosen.state === state ? "" : state;
        touch("learners");
      } });
      buttons.set(state, button);
      $("states").append(button);
    }
    say(button, `${counts[state] ?? 0} ${words(state)}`);
    button.hidden = !counts[state] && chosen.state !== state;
    button.setAttribute("aria-pressed", String(chosen.state === state));
  }
}

const natural = new Intl.Collator("en", { numeric: true });

function render() {
  const all = [...store.learners.values()];
  const counts = {};
  let fastest = 0;
  for (const l of all) {
    const state = stateOf(l);
    counts[state] = (counts[state] ?? 0) + 1;
    fastest = Math.max(fastest, l.tokens_per_s);
  }
  states(counts);
  const text = chosen.text.toLowerCase();
  const rank = (l) => Math.min(2, ORDER.indexOf(stateOf(l))); // trouble first, and no other moves
  const shown = all
    .filter((l) => (!chosen.state || stateOf(l) === chosen.state) && (!text || `${l.name} ${l.host}`.toLowerCase().includes(text)))
    .sort((a, b) => rank(a) - rank(b) || natural.compare(a.name, b.name));
  list.classList.toggle("many", all.length > MANY);
  list.classList.toggle("few", all.length <= FEW);
  rows.show(shown.map((l) => l.name));
  for (const l of shown) rows.rows.get(l.name).show(l, fastest);
  firstStop(list);
  $("lanes-none").hidden = shown.length > 0;
  say($("lanes-none"), all.length ? "No learner is like that." : "No learner yet: start one with skerry learner.");
}

export function tick() {
  const at = now();
  for (const lane of visible) {
    lane.tick(at);
    lane.draw();
  }
}

export function paint() {
  colours = {
    faint: colour("faint"), training: colour("sea"), suspect: colour("sand"), gone: colour("coral"), catching_up: colour("sky"),
    starting: colour("iris"), finished: colour("stone"), stopped: colour("stone"),
  };
  tick();
}

$("filter").addEventListener("input", (e) => { chosen.text = e.target.value; touch("learners"); });
for (const button of document.querySelectorAll("[data-reach]")) {
  button.addEventListener("click", () => {
    chosen.reach_s = Number(button.dataset.reach);
    for (const other of document.querySelectorAll("[data-reach]")) other.setAttribute("aria-pressed", String(other === button));
    tick();
    touch("rounds");
  });
}
// All lanes as they are drawn here: a learner's states from when to when, and what was merged of it.
function told() {
  const end = now(), found = [["learner", "what", "from", "to"]];
  const date = (at) => new Date(1000 * at).toISOString();
  for (const { name, number } of store.learners.values()) {
    const turns = store.lanes.get(name) ?? [];
    turns.forEach(([at, state], i) => found.push([name, state, date(at), date(turns[i + 1]?.[0] ?? end)]));
    for (const [at, late] of store.marks.get(number) ?? []) found.push([name, late ? "merged late" : "merged", date(at), date(at)]);
  }
  return found;
}

offer($("learners-head"), "lanes", () => {
  const lanes = [...rows.rows.values()].filter((lane) => lane.learner);
  for (const lane of lanes) lane.draw();
  return picture(`learners, the last ${chosen.reach_s / 60} min`, 900, 30 * lanes.length + 8, (c) => lanes.forEach((lane, i) => {
    c.fillStyle = colour("ink");
    c.fillText(lane.name, 10, 30 * i + 20, 150);
    if (lane.strip.width) c.drawImage(lane.strip, 170, 30 * i + 4, 720, 24);
  }));
}, told);
export const reach = () => chosen.reach_s;
roving(list);
listen(["learners"], render);
listen(["marks", "lanes"], () => { for (const lane of visible) lane.draw(); });
