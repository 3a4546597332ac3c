// The timeline of rounds: each as a bar from its opening, all on one scale, newest first.
import { $, cell, colour, el, firstStop, roving, Rows, say, svg } from "./dom.js";
import { age, clock, duration, loss, words } from "./format.js";
import { openAir, openRound, toQuorum } from "./record.js";
import { offer, picture } from "./save.js";
import { leave, listen, now, store, touch } from "./store.js";

const MOST = 80;
const section = $("rounds"), list = $("round-rows");
const head = el("div", { class: "round head-row", "aria-hidden": "true" });
for (const [text, kind] of [["committed", ""], ["fragment", ""], ["", "scale"], ["closed by", "reason"], ["in", "number"], ["stale", "number"], ["loss", "loss number"], ["trace", "trace"]]) head.append(el("span", { class: kind }, text));
list.before(head);
const scaleNote = el("span");
head.children[2].append(el("span", {}, "opened"), scaleNote);
let scale_s = 1;

offer($("rounds-head"), "rounds", () => picture(`rounds, from their opening to +${duration(scale_s)}`, 900, 20 * held.length + 8, (c) => held.forEach(([, r], i) => {
  const p = phases(r), x = (s) => 190 + 700 * Math.max(0, Math.min(1, s / scale_s)), y = 20 * i + 4;
  c.fillStyle = colour("ink");
  c.fillText(`${clock(r.closed_s)} f${r.fragment} v${r.version}`, 10, y + 12, 170);
  for (const [from, to, tone] of [[0, p.wait, "stone"], [p.wait, p.grace, "sky"], [p.grace, p.commit, "sea"]]) {
    c.fillStyle = colour(tone);
    c.fillRect(x(from), y + 3, x(to) - x(from), 9);
  }
})), () => {
  const columns = store.facts.columns?.rounds ?? [];
  return [columns, ...[...store.rounds.values()].map((r) => columns.map((name) => (Array.isArray(r[name]) ? r[name].join(" ") : r[name])))];
});

// Seconds from the opening: to quorum, to the end of grace, to the commit in the log, to adoption.
export function phases(r) {
  const wait = r.quorum_s, grace = wait + r.grace_s;
  return { wait, grace, commit: Math.max(grace, r.stored_s - r.opened_s), adopted: r.adopted_s === null ? null : Math.max(0, r.adopted_s - r.opened_s) };
}

export function bar(r, whole_s, label = true) {
  const picture = svg("svg", { viewBox: "0 0 1000 18", preserveAspectRatio: "none", "aria-hidden": label ? "true" : "false" });
  const p = phases(r), x = (s) => Math.max(0, Math.min(1000, (1000 * s) / whole_s));
  const rect = (from, to, kind) => picture.append(svg("rect", { x: x(from).toFixed(1), y: 5, width: Math.max(0.5, x(to) - x(from)).toFixed(1), height: 8, class: `g-${kind}` }));
  rect(0, p.wait, "wait");
  if (r.grace_s > 0) rect(p.wait, p.grace, "grace");
  rect(p.grace, p.commit, "commit");
  const ticks = r.arrived_s.map((s) => `M${x(s).toFixed(1)} 2v14`).join("");
  if (ticks) picture.append(svg("path", { d: ticks, class: r.arrived_s.length > 12 ? "g-arrive crowd" : "g-arrive", "vector-effect": "non-scaling-stroke" }));
  if (p.adopted !== null) picture.append(svg("path", { d: `M${x(p.adopted).toFixed(1)} 3v12`, class: "g-adopt", "vector-effect": "non-scaling-stroke" }));
  return picture;
}

class Row {
  constructor(key) {
    this.time = el("time");
    this.name = el("b");
    this.version = el("span");
    this.reason = el("span");
    this.in = el("span");
    this.stale = el("span");
    this.loss = el("span");
    this.trace = el("span");
    this.bar = el("span");
    this.phases = el("span", { class: "hidden" });
    this.button = el("button", { type: "button", class: "round", "data-row": "", tabindex: "-1", "data-round": key, onclick: () => openRound(this.told.fragment, this.told.version) },
      this.time, el("span", { class: "who" }, this.name, " ", this.version), el("span", {}, this.bar, this.phases), cell("closed by", "reason", this.reason),
      cell("contributions", "number", this.in), cell("stale or refused", "number", this.stale), cell("loss", "number loss", this.loss), cell("trace", "trace mono", this.trace));
    this.node = el("li", {}, this.button);
  }

  show(r) {
    if (this.told === r && this.scale === scale_s) return;
    this.told = r;
    this.scale = scale_s;
    say(this.time, clock(r.closed_s));
    say(this.name, `f${r.fragment}`);
    say(this.version, `v${r.version}`);
    say(this.reason, words(r.reason));
    say(this.in, String(r.learners));
    say(this.stale, r.refused ? `✕${r.refused}` : String(r.staleness));
    this.stale.className = `number ${r.refused ? "bad" : r.staleness ? "late" : ""}`;
    this.stale.title = r.refused ? `${r.refused} refused` : `stalest: ${r.staleness}`;
    say(this.loss, loss(r.loss, 2));
    say(this.trace, r.trace_id ? r.trace_id.slice(0, 12) : "–");
    const p = phases(r);
    this.bar.replaceChildren(bar(r, scale_s));
    say(this.phases, ` step ${r.step}, time to quorum ${toQuorum(r)}, grace ${duration(r.grace_s)}, committed after ${duration(p.commit)}, adopted by ${r.adopted}`);
  }
}

const rows = new Rows(list, (key) => new Row(key));
let held = []; // what is shown while somebody points at it or has the focus in it: keys, and rounds that the store may have let go

// The whole section counts: who goes from a row to what lets the rows go must find it where it was.
function busy() {
  return section.matches(":hover") || section.querySelector(":focus") !== null || $("round").open;
}

function render() {
  const all = [...store.rounds.entries()].sort((a, b) => b[1].closed_s - a[1].closed_s || b[1].sequence - a[1].sequence);
  if (held.length && busy()) {
    held = held.map(([key, r]) => [key, store.rounds.get(key) ?? r]);
    const still = new Set(held.map(([key]) => key));
    const newer = all.filter(([key, r]) => !still.has(key) && r.closed_s >= held[0][1].closed_s).length;
    say($("newer"), `${newer}${newer === all.length ? "+" : ""} newer`);
    $("newer").classList.toggle("some", newer > 0);
  } else {
    $("newer").classList.remove("some");
    held = all.slice(0, MOST);
    const lengths = held.map(([, r]) => phases(r)).map((p) => Math.max(p.commit, Math.min(p.adopted ?? 0, 2 * p.commit + 0.5))).sort((a, b) => a - b);
    const wanted = Math.max(0.02, (lengths[Math.floor(0.9 * (lengths.length - 1))] ?? 1) * 1.15);
    if (wanted > scale_s || wanted < 0.6 * scale_s) scale_s = wanted;
  }
  say(scaleNote, `+${duration(scale_s)}`);
  head.hidden = held.length === 0;
  rows.show(held.map(([key]) => key));
  for (const [key, r] of held) rows.rows.get(key).show(r);
  firstStop(list);
  $("rounds-none").hidden = store.rounds.size > 0;
}

class Open {
  constructor(key) {
    this.key = key;
    this.time = el("time");
    this.name = el("b");
    this.version = el("span");
    this.rect = svg("rect", { x: 0, y: 5, height: 8, class: "g-open" });
    this.words = el("span", { class: "reason" });
    const picture = svg("svg", { viewBox: "0 0 1000 18", preserveAspectRatio: "none", "aria-hidden": "true" });
    picture.append(this.rect);
    this.button = el("button", { type: "button", class: "round", "data-row": "", tabindex: "-1", "data-air": key, onclick: () => openAir(this.told) },
      this.time, el("span", { class: "who" }, this.name, " ", this.version), el("span", {}, picture), this.words);
    this.node = el("li", {}, this.button);
  }

  show(o, at) {
    this.told = o;
    say(this.time, "in the air");
    say(this.name, `f${o.fragment}`);
    say(this.version, `v${o.version}`);
    this.rect.setAttribute("width", Math.min(1000, (1000 * Math.max(0, at - o.opened_s)) / scale_s).toFixed(0));
    say(this.words, `${age(at - o.opened_s)}${o.attempt ? `, try ${o.attempt + 1}` : ""}${o.final ? ", final" : ""}`);
  }
}

const open = new Rows($("open-rows"), (key) => new Open(key));

export function tick() {
  const at = now();
  const keys = store.run.finished ? [] : [...store.open.keys()].sort((a, b) => store.open.get(a).opened_s - store.open.get(b).opened_s);
  open.show(keys);
  for (const key of keys) open.rows.get(key).show(store.open.get(key), at);
  firstStop($("open-rows"));
}

$("newer").addEventListener("click", () => { held = []; document.activeElement.blur(); list.scrollTop = 0; render(); });
section.addEventListener("mouseleave", () => touch("rounds"));
section.addEventListener("focusout", () => setTimeout(() => touch("rounds"), 0));
$("find").addEventListener("submit", (e) => {
  e.preventDefault();
  const fragment = parseInt($("find-fragment").value || "0", 10), version = parseInt($("find-version").value || "0", 10);
  if (fragment >= 0 && version > 0) openRound(fragment, version);
  else $("find-version").focus();
});
roving(list);
roving($("open-rows"));
leave(() => { held = []; });
listen(["rounds"], render);
listen(["open", "run"], tick);
