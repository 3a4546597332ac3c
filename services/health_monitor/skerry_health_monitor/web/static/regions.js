// Learners by their region: what crossed the far link for each, and how far behind its learners are.
import { $, el } from "./dom.js";
import { ago, bytes, percent } from "./format.js";
import { listen, now, store } from "./store.js";

function row(name, learners) {
  const sum = (of) => learners.reduce((total, l) => total + of(l), 0);
  const read = sum((l) => l.bytes_down), cached = sum((l) => l.cached_bytes);
  const most = Math.max(...learners.map((l) => l.staleness)), at = Math.min(...learners.map((l) => now() - l.seen_s));
  const cells = [String(learners.length), bytes(sum((l) => l.bytes_up)), bytes(read), percent(read ? Math.min(1, cached / read) : 0),
    `${(sum((l) => l.staleness) / learners.length).toFixed(1)}, ${most}`, ago(at)];
  return el("tr", {}, el("th", { scope: "row" }, name || "the hub"), ...cells.map((text) => el("td", {}, text)));
}

listen(["learners"], () => {
  const regions = Map.groupBy(store.learners.values(), (l) => l.region);
  $("regions").hidden = ![...regions.keys()].some(Boolean);
  if (!$("regions").hidden) $("region-rows").replaceChildren(...[...regions].sort(([a], [b]) => a.localeCompare(b)).map(([name, learners]) => row(name, learners)));
});
