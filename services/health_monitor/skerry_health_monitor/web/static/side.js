// Alerts, samples, checkpoints and the log's streams.
import { $, el, mark, Rows, say } from "./dom.js";
import { age, ago, bytes, clock, count, duration, gist, loss, whole } from "./format.js";
import { leave, listen, now, store } from "./store.js";

class Alert {
  constructor(key) {
    this.key = key;
    this.tone = el("b");
    this.text = el("p");
    this.fix = el("small");
    this.time = el("time");
    this.node = el("li", { class: "alert" }, this.tone, this.text, this.time, this.fix);
  }

  show(a) {
    mark(this.node, "severity", a.severity);
    say(this.tone, a.severity);
    say(this.text, a.text);
    say(this.fix, a.fix);
    say(this.time, age(now() - a.since_s));
  }
}

const alerts = new Rows($("alerts-now"), (key) => new Alert(key));
const WORST = { critical: 0, warning: 1, info: 2 };

let told = new Map();

// Who is suspect changes all the time, and is no reason to interrupt whoever listens.
function news(before, a) {
  return before === undefined || WORST[a.severity] < WORST[before.severity] || (a.severity !== "info" && gist(a.text) !== gist(before.text));
}

// Who listens hears what begins, what gets worse, of whom else it is said and what is over, not each
// second how long it has lasted. Under one number is one alert only: a monitor that is started again
// goes on above.
function tellAlerts(active) {
  const held = new Map(active);
  const begun = active.filter(([key, a]) => news(told.get(key), a));
  const again = new Set(begun.map(([, a]) => gist(a.text)));
  const over = [...told].filter(([key, a]) => !held.has(key) && !again.has(gist(a.text)));
  if (begun.length + over.length) say($("alerts-told"), [...begun.map(([, a]) => `${a.severity}: ${a.text}`), ...over.map(([, a]) => `over: ${a.text}`)].join(" "));
  told = held;
}

function showAlerts() {
  const all = [...store.alerts.entries()];
  const active = all.filter(([, a]) => a.until_s === null).sort((a, b) => WORST[a[1].severity] - WORST[b[1].severity] || b[1].since_s - a[1].since_s);
  const past = all.filter(([, a]) => a.until_s !== null).sort((a, b) => b[1].until_s - a[1].until_s);
  alerts.show(active.map(([key]) => key));
  for (const [key, a] of active) alerts.rows.get(key).show(a);
  tellAlerts(active);
  $("alerts").classList.toggle("some", all.length > 0);
  const details = $("alerts-past");
  details.hidden = past.length === 0;
  say(details.querySelector("summary"), `${past.length} earlier alert${past.length === 1 ? "" : "s"}, the last over since ${past.length ? clock(past[0][1].until_s) : "–"}`);
  details.querySelector("ul").replaceChildren(...past.slice(0, 60).map(([, a]) => el("li", {}, el("time", {}, `${new Date(1000 * a.since_s).toLocaleDateString("en-GB")} ${clock(a.since_s)}`), el("time", {}, `for ${duration(a.until_s - a.since_s)}`), el("span", {}, a.text))));
}

const picker = { last: true };

function showSample() {
  const samples = [...store.samples.values()].sort((a, b) => a.step - b.step || a.at_s - b.at_s);
  const range = $("sample-range");
  range.max = Math.max(0, samples.length - 1);
  if (picker.last) range.value = range.max;
  $("sample-pick").hidden = samples.length < 2;
  const s = samples[Number(range.value)];
  say($("sample"), s ? s.text : "");
  $("sample").hidden = !s;
  say($("sample-note"), s ? `global model at step ${whole(s.step)}${s.loss === null ? "" : `, held-out ${loss(s.loss)}`}, ${clock(s.at_s)}` : "after the first evaluation that samples");
}
$("sample-range").addEventListener("input", (e) => {
  picker.last = e.target.value === e.target.max;
  showSample();
});

class Checkpoint {
  constructor() {
    this.step = el("b");
    this.size = el("span");
    this.time = el("time");
    this.path = el("span", { class: "path mono" });
    this.node = el("li", { class: "checkpoint" }, this.step, this.size, this.time, this.path);
  }

  show(c) {
    say(this.step, `step ${whole(c.step)}`);
    say(this.size, `${bytes(c.bytes)}, ${count(c.tokens)} tokens`);
    say(this.time, ago(now() - c.written_s));
    say(this.path, c.path);
    this.node.title = `digest ${c.digest}, after ledger sequence ${c.sequence}`;
  }
}

const checkpoints = new Rows($("checkpoint-rows"), () => new Checkpoint());

function showCheckpoints() {
  const all = [...store.checkpoints.entries()].sort((a, b) => b[1].sequence - a[1].sequence);
  checkpoints.show(all.map(([key]) => key));
  for (const [key, c] of all) checkpoints.rows.get(key).show(c);
  $("checkpoints-none").hidden = all.length > 0;
  say($("checkpoints-note"), store.facts.checkpoint_every_s ? `one each ${duration(store.facts.checkpoint_every_s)}` : "");
}

const KEEPS = { last_per_subject: "the newest", few_per_subject: "the newest few", everything: "everything", window: "a window" };

class Stream {
  constructor(key) {
    this.size = el("span");
    this.keeps = el("span");
    this.fill = el("i");
    this.bar = el("div", { class: "bar" }, this.fill);
    this.node = el("li", {}, el("b", {}, key.toLowerCase().match(/(state|contrib|ledger|members|pulse)(_\d+)?$/)?.[0].replace("_", " ") ?? key), this.size, this.keeps, this.bar);
  }

  show(s) {
    say(this.size, `${bytes(s.bytes)} in ${count(s.messages)} messages`);
    say(this.keeps, KEEPS[s.retention] ?? s.retention);
    const share = s.max_bytes > 0 ? s.bytes / s.max_bytes : 0;
    this.bar.hidden = s.max_bytes <= 0;
    this.fill.style.width = `${Math.min(100, 100 * share).toFixed(1)}%`;
    this.bar.toggleAttribute("data-full", share > 0.9 && s.retention !== "window");
    this.node.title = s.max_bytes > 0 ? `${Math.round(100 * share)} % of ${bytes(s.max_bytes)}` : "no limit of its own";
  }
}

const streams = new Rows($("stream-rows"), (key) => new Stream(key));

function showStreams() {
  const keys = [...store.streams.keys()].sort();
  streams.show(keys);
  for (const key of keys) streams.rows.get(key).show(store.streams.get(key));
}

export function tick() {
  showAlerts();
  showCheckpoints();
}
leave(() => { told = new Map(); picker.last = true; });
listen(["alerts"], showAlerts);
listen(["samples"], showSample);
listen(["checkpoints", "facts"], showCheckpoints);
listen(["streams"], showStreams);
