// The header and the tiles: the run in one look.
import { $, colour, el, mark, say } from "./dom.js";
import { age, ago, bytes, count, duration, loss, percent, whole } from "./format.js";
import { offer, picture } from "./save.js";
import { listen, now, store } from "./store.js";

const USES = ["train", "compile", "recover", "wait", "replay", "idle", "down"];
const TOLD = { train: "training", compile: "starting and compiling", recover: "catching up", wait: "waiting for others", replay: "repeating lost steps", idle: "idle", down: "down" };

const TILES = [
  ["loss", "Training loss", "loss"], ["held", "Held-out loss", "loss"], ["speed", "Tokens per second", "throughput"], ["goodput", "Goodput", "goodput"],
  ["alive", "Learners", "learner"], ["rounds", "Rounds", "round"], ["sent", "Sent", "sent"], ["checkpoint", "Checkpoint", "checkpoint"],
];
const tiles = {};
for (const [name, title, word] of TILES) {
  const value = el("dd"), more = el("dd", { class: "more" });
  const box = el("div", { class: "tile", id: `tile-${name}` }, el("dt", {}, el("button", { type: "button", class: "word", "data-word": word }, title)), value, more);
  tiles[name] = { box, value: el("span"), unit: el("small"), more };
  value.append(tiles[name].value, tiles[name].unit);
  $("tiles").append(box);
}

const together = (text) => text.replace(/(\d) (?=\S{1,2}(\s|$|,))/g, "$1\u00a0"); // a number and its unit

function tile(name, value, unit, more, tone = "") {
  say(tiles[name].value, value);
  say(tiles[name].unit, unit ? ` ${unit}` : "");
  say(tiles[name].more, together(more));
  tiles[name].more.title = more;
  mark(tiles[name].box, "tone", tone);
}

function status() {
  const { run } = store;
  if (store.state === "waiting") return ["waiting for the run", ""];
  if (store.state === "connecting") return ["connecting", ""];
  if (run.finished) return ["finished", "good"];
  if (store.state === "away") return ["monitor away", "bad"];
  if (run.away_since_s) return ["broker away", "bad"];
  if (!run.rounds && !run.tokens) return ["starting", "warn"];
  if (!run.alive) return ["nobody trains", "bad"];
  return run.tokens_per_s > 0 ? ["training", "good"] : ["standing still", "warn"];
}

// A monitor that was started again has no run before it has found it: what was known may be of a
// log that is no more. Until the whole is told anew it stays, faded, as while the monitor is away.
const waits = () => !store.facts.run || store.state === "waiting";

const begun = () => store.run.rounds > 0 || store.run.tokens > 0;

// What to do next, while there are no numbers to show.
function next() {
  const { run } = store, waiting = waits();
  const idle = !waiting && !run.finished && !run.counting && !begun();
  $("next").hidden = !(idle || store.state === "waiting") || Boolean(waiting && store.facts.run);
  document.body.classList.toggle("unborn", store.state === "waiting" && !store.facts.run);
  if ($("next").hidden) return;
  const name = store.facts.run ?? store.name, start = run.alive > 0;
  say($("next-title"), waiting ? "No run yet" : "No step yet");
  say($("next-what"), start ? `${run.alive} of ${run.learners} learners start: they read text and compile, which takes a minute or more. Without a syncer none comes further: its command is below.`
    : waiting ? `The run “${name}” appears here with its first learner.` : "The run waits for a learner and a syncer.");
  const lines = [["all on this machine", "skerry up run.toml"], ["a learner", `skerry learner --run ${name}`], ["a syncer", `skerry syncer --run ${name}`]];
  if ($("next-steps").said !== `${name} ${start}`) $("next-steps").replaceChildren(...lines.slice(start ? 2 : 0).map(([what, line]) => el("li", {}, `${what}: `, el("code", {}, line))));
  $("next-steps").said = `${name} ${start}`;
}

function progress(share) {
  $("progress").firstElementChild.style.width = `${Math.min(100, 100 * share).toFixed(1)}%`;
  $("progress").setAttribute("aria-valuenow", Math.round(100 * share));
}

function header() {
  const { run, facts } = store;
  const [text, tone] = status();
  const waiting = waits();
  const stale = waiting ? Boolean(facts.run) : store.state === "away" && !store.ended;
  say($("status"), text);
  mark($("status"), "tone", tone);
  say($("run-name"), facts.run ?? store.name ?? "Skerry");
  say($("link").lastElementChild, store.state === "live" ? "live" : store.ended ? "ended" : store.state === "away" ? "reconnecting" : store.state);
  mark($("link"), "state", store.ended && store.state !== "live" ? "ended" : store.state);
  document.body.classList.toggle("waiting", waiting);
  document.body.classList.toggle("away", stale);
  next();
  if (waiting) {
    say($("steps"), `There is no run ${store.name ? `“${store.name}” ` : ""}in this log yet: it appears with its first learner.`);
    say($("times"), "");
    progress(0);
    return;
  }
  const elapsed = run.wall_s ?? Math.max(0, now() - facts.created_s);
  const left = run.finished ? 0 : run.eta_s;
  const byTime = run.timed && left !== null && left !== undefined;
  const share = run.finished ? 1 : byTime ? elapsed / Math.max(1e-9, elapsed + left) : run.steps ? run.step / run.steps : 0;
  progress(share);
  say($("steps"), byTime ? `step ${whole(run.step)}, ends by time` : `step ${whole(run.step)} of ${whole(run.steps)}${run.counting ? ", reading the history" : ""}`);
  say($("times"), run.finished ? `took ${duration(elapsed)}` : `${duration(elapsed)} so far · ${left === null || left === undefined ? "end unknown" : `${duration(left)} left`}`);
}

function tileAll() {
  const { run, facts } = store;
  if (!facts.run) return;
  tile("loss", loss(run.loss), run.loss === null ? "" : "nats", run.tokens ? `${count(run.tokens)} tokens trained` : "no step yet");
  const evaluated = [...store.evaluations.values()];
  const first = evaluated.find((e) => e.loss !== null);
  const bits = run.bits_per_byte === null ? "" : `${run.bits_per_byte.toFixed(3)} bits/byte, `;
  const average = run.held_out_average === null ? "" : `, moving average ${loss(run.held_out_average)}`;
  tile("held", loss(run.held_out), run.held_out === null ? "" : "nats",
    run.held_out === null ? "not evaluated yet" : `${bits}step ${whole(run.held_out_step)}${first && first.loss !== run.held_out ? `, from ${loss(first.loss, 2)}` : ""}${average}`);
  const pace = store.run.learners ? `${count(facts.batch_tokens)} a step and learner` : "";
  tile("speed", begun() ? count(run.tokens_per_s) : "–", "", pace, !run.finished && run.rounds && !run.tokens_per_s ? "warn" : "");
  tile("goodput", begun() ? percent(run.goodput) : "–", "", begun() ? lost(run.time) : "from the first step on", begun() && run.goodput < 0.5 && now() - facts.created_s > 300 ? "warn" : "");
  tile("alive", String(run.alive ?? 0), `of ${run.learners}`, `laid out for ${facts.learners}, quorum ${facts.quorum}`,
    !run.finished && begun() && run.alive < run.learners ? (run.alive < facts.quorum ? "bad" : "warn") : "");
  const last = run.last_round_s === null ? "none yet" : `last ${ago(now() - run.last_round_s)}`;
  tile("rounds", whole(run.rounds), "", run.round_gap_s ? `${last}, one each ${duration(run.round_gap_s)}` : last);
  const sent = run.bytes_up + run.bytes_down;
  const times = sent > 0 ? run.bytes_data_parallel / sent : 0;
  tile("sent", ...bytes(sent).split(" "),
    times > 1 ? `${times.toFixed(times < 10 ? 1 : 0)}× below data-parallel` : `${bytes(run.bytes_up)} up, ${bytes(run.bytes_down)} down`);
  // By its commits: a monitor that was started again tells of the newest one first, and clocks jump.
  const newest = [...store.checkpoints.values()].reduce((a, b) => (a && a.sequence > b.sequence ? a : b), null);
  tile("checkpoint", newest ? age(now() - newest.written_s) : "–", newest ? (now() - newest.written_s < 1 ? "" : "ago") : "", newest ? `step ${whole(newest.step)}, ${bytes(newest.bytes)}` : "none yet");
}

function lost(time = {}) {
  const most = Object.entries(time).filter(([use]) => use !== "train").sort((a, b) => b[1] - a[1])[0];
  return most && most[1] >= 0.005 ? `most lost: ${TOLD[most[0]] ?? most[0]} ${percent(most[1])}` : "nothing lost";
}

const keys = {}, parts = {};
for (const use of USES) {
  $("split").append((parts[use] = el("i", { "data-use": use })));
  keys[use] = el("span");
  $("split-key").append(el("li", { "data-use": use, class: "key" }, keys[use]));
}

function split() {
  const time = begun() ? store.run.time ?? {} : {};
  for (const use of USES) {
    const share = time[use] ?? 0;
    parts[use].style.width = `${(100 * share).toFixed(2)}%`;
    say(keys[use], `${TOLD[use]} ${percent(share, share && share < 0.0995 ? 1 : 0)}`);
    keys[use].parentElement.hidden = use !== "train" && share < 0.0005;
  }
  $("split").setAttribute("aria-label", USES.filter((u) => time[u]).map((u) => `${TOLD[u]} ${percent(time[u], 1)}`).join(", ") || "no step yet");
}

const FACTS = [
  ["mode", (f) => f.mode], ["model", (f) => `${f.model}, ${count(f.parameters)} parameters`],
  ["fragments, H, tau", (f) => `${f.fragments}, ${f.h_steps}, ${f.overlap_steps}`],
  ["quorum", (f) => `${f.quorum} of ${f.learners}`], ["merge", (f) => f.merge],
  ["on the wire", (f) => `${f.contribution_scheme} up, ${f.global_scheme} down`],
  ["created", (f) => new Date(1000 * f.created_s).toLocaleString("en-GB")],
  ["restored from", (f) => f.restored_from], ["Skerry", (f) => f.version],
];

function shares() {
  return USES.filter((use) => store.run.time?.[use]).map((use) => [TOLD[use], store.run.time[use], getComputedStyle(parts[use]).backgroundColor]);
}

offer($("split-title"), "time", () => picture("where the learners' time went", 720, 56, (c) => {
  let from = 10;
  for (const [name, share, tone] of shares()) {
    c.fillStyle = tone;
    c.fillRect(from, 4, 700 * share, 20);
    c.fillStyle = colour("ink");
    if (share > 0.09) c.fillText(`${name} ${percent(share)}`, from, 42, 700 * share);
    from += 700 * share;
  }
}), () => [["use", "share"], ...shares().map(([name, share]) => [name, share])]);

function facts() {
  if (!store.facts.run) return;
  $("facts").replaceChildren(...FACTS.filter(([, of]) => of(store.facts)).flatMap(([name, of]) => [el("dt", {}, name), el("dd", {}, of(store.facts))]));
}

function title() {
  if (waits()) {
    document.title = store.facts.run ?? "Skerry";
    return;
  }
  const active = [...store.alerts.values()].filter((a) => a.until_s === null);
  const bad = active.filter((a) => a.severity !== "info").length;
  const { run } = store;
  document.title = `${bad ? `(${bad}) ` : ""}${store.facts.run ?? "Skerry"}${run.finished ? " finished" : ""}${run.loss ? ` · ${loss(run.loss)}` : ""}`;
}

export function tick() {
  header();
  tileAll();
}
listen(["run", "facts", "state", "checkpoints", "evaluations"], tick);
listen(["run"], split);
listen(["facts"], facts);
listen(["run", "alerts", "facts", "state"], title, true);
