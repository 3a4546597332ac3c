// One learner, and what may be done to it where the run allows chaos.
import { $, el, say } from "./dom.js";
import { ago, bytes, count, duration, loss, percent, whole, words } from "./format.js";
import { listen, now, store } from "./store.js";

let shown = "";
const body = $("learner-body");
const pairs = el("dl", { class: "pairs" });
const values = {};

const FIELDS = [
  ["state", (l) => `${words(l.liveness)}, ${words(l.phase)} (${words(l.reason)})${l.quarantine ? `; in quarantine (${words(l.quarantine)})` : ""}`], ["host", (l) => l.host || "–"], ["devices", (l) => (l.device ? `${l.device}${l.mesh ? ` (${l.mesh})` : ""}` : "–")], ["start", (l) => `number ${l.incarnation}`],
  ["heard", (l) => ago(now() - l.seen_s)], ["step", (l) => whole(l.step)], ["step time", (l) => (l.step_time_s ? duration(l.step_time_s) : "–")],
  ["tokens per second", (l) => count(l.tokens_per_s)], ["utilisation (MFU)", (l) => (l.mfu === null ? "–" : percent(l.mfu, 1))], ["tokens", (l) => count(l.tokens)], ["loss", (l) => loss(l.loss)],
  ["contributions", (l) => count(l.contributions)], ["last merged", (l) => (l.last ? `f${l.last[0]} v${l.last[1]}, ${ago(now() - l.last[2])}` : "–")], ["stale by", (l) => `${l.staleness} versions`],
  ["sent", (l) => `${bytes(l.bytes_up)} up, ${bytes(l.bytes_down)} down`], ["region", (l) => (l.region ? `${l.region}; ${percent(l.bytes_down ? Math.min(1, l.cached_bytes / l.bytes_down) : 0, 0)} of what it read came from its cache` : "–")], ["rounds skipped", (l) => count(l.syncs_skipped)], ["goodput", (l) => percent(l.goodput, 1)],
  ["its time", (l) => Object.entries(l.time ?? {}).map(([use, share]) => `${words(use)} ${percent(share, 1)}`).join(", ") || "–"],
];
for (const [name] of FIELDS) {
  values[name] = el("dd");
  pairs.append(el("div", {}, el("dt", {}, name), values[name]));
}

function refresh() {
  const l = store.learners.get(shown);
  if (!l || !$("learner").open) return;
  for (const [name, of] of FIELDS) say(values[name], of(l));
}

let token = "";
try { token = sessionStorage.getItem("skerry-token") ?? ""; } catch { /* storage may be forbidden */ }
const given = /^#token=([\w-]+)$/.exec(location.hash);
if (given) {
  token = given[1];
  try { sessionStorage.setItem("skerry-token", token); } catch { /* then it lasts as long as the page */ }
  history.replaceState(null, "", location.pathname);
}

function faults(name) {
  if (!store.facts.actions) return null;
  const seconds = el("input", { type: "number", id: "fault-s", min: "0.5", max: "300", step: "0.5", value: "5", "aria-label": "Seconds" });
  const secret = el("input", { type: "password", id: "token", autocomplete: "off", placeholder: "token", "aria-label": "Token", value: token });
  const said = el("p", { class: "said", role: "status" });
  const buttons = [["kill", "kill", "SIGKILL; it is started again after this time"], ["pause", "pause", "SIGSTOP for this time"], ["partition", "cut off", "its way to the broker is cut for this time"], ["heal", "heal", "end whatever was done to it"]]
    .map(([action, text, title]) => el("button", { type: "button", title, "data-action": action, class: action === "heal" ? "" : "hot", onclick: () => inject(name, action, Number(seconds.value), secret.value, said) }, text));
  return el("form", { class: "fault", id: "fault", onsubmit: (e) => e.preventDefault() }, el("b", {}, "This run allows faults"), ...buttons, el("label", {}, "for ", seconds, " s"), secret, said);
}

async function inject(name, action, duration_s, secret, said) {
  token = secret.trim();
  try { sessionStorage.setItem("skerry-token", token); } catch { /* as above */ }
  say(said, "…");
  let told;
  try {
    const answer = await fetch(`/api/learners/${encodeURIComponent(name)}/${action}`, {
      method: "POST", headers: { "authorization": `Bearer ${token}`, "content-type": "application/json" }, body: JSON.stringify({ duration_s }),
    });
    told = await answer.json();
  } catch {
    told = { error: "The monitor does not answer." };
  }
  said.dataset.tone = told.error ? "bad" : "good";
  say(said, told.error ?? told.said);
}

export function openLearner(name) {
  shown = name;
  say($("learner-title"), name);
  const rows = [pairs, faults(name)].filter(Boolean);
  body.replaceChildren(...rows);
  if (!$("learner").open) $("learner").showModal();
  refresh();
}

$("learner").addEventListener("close", () => { shown = ""; body.replaceChildren(); });
listen(["learners"], refresh);
