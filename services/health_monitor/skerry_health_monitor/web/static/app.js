// Puts it together: connection, theme, keys, and one tick a second for ages.
import * as charts from "./charts.js";
import { $, say } from "./dom.js";
import * as fragments from "./fragments.js";
import * as glance from "./glance.js";
import * as lanes from "./lanes.js";
import { openAddressed } from "./record.js";
import "./regions.js";
import * as rounds from "./rounds.js";
import * as side from "./side.js";
import { connect, listen } from "./store.js";

const TICK_MS = 1000;

function repaint() {
  lanes.paint();
  fragments.paint();
  charts.redraw();
}

function dark() {
  const wanted = document.documentElement.dataset.theme;
  return wanted ? wanted === "dark" : !matchMedia("(prefers-color-scheme: light)").matches;
}

function turn() {
  const to = dark() ? "light" : "dark";
  document.documentElement.dataset.theme = to;
  try { localStorage.setItem("skerry-theme", to); } catch { /* then it lasts as long as the page */ }
  repaint();
}

// Never into a field of text: it would take the next key for a letter.
function go(id, inside = id) {
  $(id).scrollIntoView({ block: "start" });
  const stops = [...$(inside).querySelectorAll('[tabindex="0"]')];
  const target = stops.find((stop) => stop.checkVisibility()) ?? $(id);
  if (target === $(id)) target.tabIndex = -1; // nothing to stop at: from here on Tab goes on
  target.focus({ preventScroll: true });
}

const KEYS = {
  g: () => { scrollTo({ top: 0 }); $("main").focus(); },
  l: () => go("learners", "lanes"), f: () => go("fragments"), r: () => go("rounds", "round-rows"), w: () => go("writes"),
  t: turn, "/": () => { go("learners"); $("filter").focus(); }, "?": () => $("help").showModal(),
};

document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || document.querySelector("dialog[open]")) return;
  if (e.target.matches("input, textarea, select")) {
    if (e.key === "Escape") e.target.blur();
    return;
  }
  const act = KEYS[e.key];
  if (act) {
    e.preventDefault();
    act();
  }
});
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (e) => { if (e.target === dialog) dialog.close(); });
}
// A term leads to its words, and says them where the pointer rests.
for (const button of document.querySelectorAll("[data-word]")) button.title = $(`word-${button.dataset.word}`).nextElementSibling.textContent;
document.addEventListener("click", (e) => {
  const word = e.target.closest?.("[data-word]")?.dataset.word;
  if (!word) return;
  $("help").showModal();
  $(`word-${word}`).focus();
});
// What others may have: a link with which they read, and inject no faults.
$("share").addEventListener("click", async () => {
  const link = await fetch("/api/share").then((answer) => answer.json()).then(({ path }) => new URL(path, location.href).href, () => null);
  try {
    await navigator.clipboard.writeText(link);
    say($("share"), "copied");
  } catch {
    prompt("A link to read this page by, without its faults:", link ?? "the monitor does not answer");
  }
});
$("theme").addEventListener("click", turn);
$("help-open").addEventListener("click", () => $("help").showModal());
matchMedia("(prefers-color-scheme: light)").addEventListener("change", repaint);

let addressed = false;
listen(["facts"], () => {
  if (!addressed) openAddressed();
  addressed = true;
});
addEventListener("hashchange", openAddressed);

function tick() {
  if (document.hidden) return;
  for (const part of [glance, lanes, fragments, rounds, side]) part.tick();
}

setInterval(tick, TICK_MS);
document.addEventListener("visibilitychange", tick);
repaint();
connect();
