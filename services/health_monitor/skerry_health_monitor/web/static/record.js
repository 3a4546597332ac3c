// One round: its trace, its ledger record, and who was in it.
import { $, el, say } from "./dom.js";
import { age, count, duration, loss, moment, percent, whole, words } from "./format.js";
import { leave, listen, now, store } from "./store.js";

const WHY = {
  all_arrived: "everybody who is alive had answered",
  grace_over: "the quorum was there, and the grace window that costs no goodput was over",
  short_handed: "fewer than the quorum were there to answer, and all of them had",
  timeout: "it had been open for sync.round_timeout_s",
  final_empty: "training is over, and nothing was left to collect",
  genesis: "the first parameters of the fragment",
  nothing_counts: "nothing that arrived could be merged: the version equals the one before",
};
const SHORT = new Set(["short_handed", "timeout", "final_empty"]); // as skerry.protocol.rounds has them: never had their quorum
const RESTORED = new Set(["restored", "replaced"]); // origins of a commit: from a checkpoint
let asked = 0;
let air = null; // the round in the air that is shown

function pair(name, value, title = "") {
  return el("div", {}, el("dt", {}, name), el("dd", { title }, value));
}

function copier(text) {
  const button = el("button", { type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      say(button, "copied");
    } catch {
      getSelection().selectAllChildren($("trace-id"));
      say(button, "selected");
    }
  } }, "copy");
  return button;
}

function traceLine(trace, origin = "") {
  const template = store.facts.trace_url;
  const open = template ? el("a", { href: template.replace("{trace_id}", encodeURIComponent(trace)), target: "_blank", rel: "noopener noreferrer", id: "trace-open" }, "open trace")
    : el("small", { id: "trace-hint" }, "set health.trace_url to open it from here");
  return [el("dt", {}, "trace id"), el("dd", { class: "mono", id: "trace-id" }, trace || (RESTORED.has(origin) ? "none: this version came from a checkpoint" : "none: the syncer is of an earlier release")),
    el("dd", { class: "do" }, ...(trace ? [copier(trace), open] : []))];
}

function traceBox(c) {
  const address = `/api/rounds/${c.fragment}/${c.version}`;
  return el("dl", { class: "trace-box" }, ...traceLine(c.trace_id, c.origin),
    el("dt", {}, "ledger record"), el("dd", { class: "mono", id: "ledger-sequence" }, `sequence ${c.ledger_sequence}`), el("dd", { class: "do" }, el("a", { href: address, target: "_blank", rel: "noopener", id: "record-open" }, "as JSON")));
}

export function toQuorum(r) {
  return SHORT.has(r.reason) ? "never had it" : duration(r.quorum_s);
}

// The record tells its times by the syncer's clock; the row has them set right by the broker's, whose
// time it is that a round was in the log, and with which the list and all ages go.
function facts(c) {
  const row = store.rounds.get(`${c.fragment}.${c.version}`);
  const opened = row?.opened_s ?? c.opened_ns / 1e9, closed = row?.closed_s ?? c.closed_ns / 1e9;
  return el("dl", { class: "pairs" },
    pair("opened", moment(opened)),
    pair("to quorum", toQuorum(c)), pair("grace", duration(c.grace_s)),
    pair("closed by", words(c.reason), WHY[c.reason] ?? ""),
    pair("in the log", row ? `${duration(Math.max(0, row.stored_s - closed))} after closing` : moment(closed)),
    pair("adopted", row?.adopted ? `by ${row.adopted}${row.adopted_s === null ? "" : `, the last ${duration(Math.max(0, row.adopted_s - opened))} after opening`}` : row ? "by nobody yet" : "too long ago to tell"),
    pair("step", whole(c.step)), pair("age", age(now() - closed)),
    pair("syncer", `${c.syncer || "–"}, fence ${c.fence}`), pair("parameters' digest", c.params_digest));
}

function table(c) {
  if (!c.consumed.length) return el("p", { class: "none" }, "No contribution was merged.");
  const opened = c.opened_ns;
  const rows = [...c.consumed].sort((a, b) => (a.arrived_ns || Infinity) - (b.arrived_ns || Infinity));
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Contributions" }, el("table", {},
    el("thead", {}, el("tr", {}, ...["learner", "answered", "stale", "steps", "tokens", "weight", "loss"].map((h) => el("th", { scope: "col" }, h)))),
    el("tbody", {}, ...rows.map((m) => el("tr", {},
      el("td", {}, m.incarnation > 1 ? `${m.learner} #${m.incarnation}` : m.learner),
      el("td", {}, m.arrived_ns ? `+${duration(Math.max(0, m.arrived_ns - opened) / 1e9)}` : "earlier"),
      el("td", {}, String(m.staleness)), el("td", {}, count(m.steps)), el("td", {}, count(m.tokens)), el("td", {}, percent(m.weight, 1)), el("td", {}, loss(m.loss)))))));
}

function refusals(c) {
  if (!c.refused.length) return null;
  return el("div", {}, el("h3", {}, "Refused"), el("ul", {}, ...c.refused.slice(0, 50).map((r) => el("li", {}, `${words(r.cause)}: ${r.learner || "unknown"}${r.tokens ? `, ${count(r.tokens)} tokens` : ""}`))));
}

// A round in the air has no record yet: what its opening said, until it is committed.
export function openAir(o) {
  const dialog = $("round");
  asked++;
  air = o;
  say($("round-title"), `Fragment ${o.fragment}, version ${o.version}, in the air`);
  $("round-body").replaceChildren(
    el("dl", { class: "trace-box" }, ...traceLine(o.trace_id)),
    el("dl", { class: "pairs" }, pair("opened", moment(o.opened_s)), pair("age", age(now() - o.opened_s)), pair("due at step", whole(o.due_step)),
      pair("try", String(o.attempt + 1), "a round to which nobody comes is opened again"), pair("kind", o.final ? "final: training is over" : "usual")),
    el("p", { class: "none", id: "in-the-air" }, "Who has answered is in its ledger record, which is shown here once it is committed."));
  if (!dialog.open) dialog.showModal();
}

function landed() {
  const newest = air ? store.fragments.get(String(air.fragment))?.version ?? 0 : 0;
  if (air && $("round").open && newest >= air.version) openRound(air.fragment, air.version);
}

export async function openRound(fragment, version) {
  const dialog = $("round"), body = $("round-body"), mine = ++asked;
  air = null;
  say($("round-title"), `Fragment ${fragment}, version ${version}`);
  body.replaceChildren(el("p", { class: "none" }, "Reading the ledger…"));
  if (!dialog.open) dialog.showModal();
  history.replaceState(null, "", `#round=${fragment}.${version}`);
  let told, text;
  try {
    const answer = await fetch(`/api/rounds/${fragment}/${version}`);
    text = await answer.text();
    told = JSON.parse(text);
  } catch {
    told = { error: "The monitor does not answer: try again." };
  }
  if (mine !== asked) return;
  if (told.error) {
    body.replaceChildren(el("p", { class: "none" }, told.error));
    return;
  }
  const raw = el("pre", { class: "record", tabindex: "0", role: "region", "aria-label": "Ledger record" });
  const details = el("details", {}, el("summary", {}, "The whole ledger record"), raw);
  details.addEventListener("toggle", () => { if (details.open) say(raw, text); }); // as it came: nanoseconds are too large for a number here
  body.replaceChildren(traceBox(told), facts(told), el("h3", {}, `Contributions (${told.consumed.length})`), table(told), ...[refusals(told)].filter(Boolean), details);
}

$("round").addEventListener("close", () => {
  asked++;
  air = null;
  $("round-body").replaceChildren();
  if (location.hash.startsWith("#round=")) history.replaceState(null, "", location.pathname);
});

export function openAddressed() {
  const found = /^#round=(\d+)\.(\d+)$/.exec(location.hash);
  if (found) openRound(Number(found[1]), Number(found[2]));
}

leave(() => { air = null; });
listen(["fragments"], landed);
