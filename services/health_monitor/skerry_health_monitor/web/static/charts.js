// Loss and throughput, drawn by uPlot; redrawn at most twice a second, and not while out of sight.
import { $, colour, say } from "./dom.js";
import { bytes, count, duration, loss, tick } from "./format.js";
import { offer, picture } from "./save.js";
import { leave, listen, now, store } from "./store.js";

const DRAW_MS = 500;
const chosen = { axis: "step", range: "run", log: false };
const SPANS = { run: Infinity, day: 86400, hour: 3600 };

function bins() {
  return [...store[`curve_${chosen.range}`].values()].sort((a, b) => a.at_s - b.at_s);
}

// Where nothing was merged for so long that nobody can have been at it.
const STILL = 6;
let breaks = []; // pairs of places on the axis between which no line belongs

// uPlot takes one axis for all: two curves with points of their own are woven together.
function lossData() {
  const trained = bins().filter((b) => b.loss !== null);
  const end = trained.at(-1)?.at_s ?? 0;
  const from = chosen.range === "run" ? -Infinity : end - SPANS[chosen.range];
  const at = (p) => (chosen.axis === "total" && p.total === undefined ? p.tokens : p[chosen.axis]);
  const judged = [...store.evaluations.values()].filter((e) => e.loss !== null && e.at_s >= from);
  const points = new Map();
  const still_s = Math.max(3 * (store.run.widths_s?.[chosen.range] ?? 1), STILL * (store.run.round_gap_s ?? 1));
  breaks = trained.flatMap((b, i) => (i && b.at_s - trained[i - 1].at_s > still_s ? [[at(trained[i - 1]), at(b)]] : []));
  for (const b of trained) points.set(at(b), [b.loss, points.get(at(b))?.[1] ?? null]);
  for (const e of judged) points.set(at(e), [points.get(at(e))?.[0] ?? null, e.loss]);
  const xs = [...points.keys()].sort((a, b) => a - b);
  return [xs, xs.map((x) => points.get(x)[0]), xs.map((x) => points.get(x)[1])];
}

// Commits come in lumps: a mean over a few expected rounds is what the eye wants.
function speedData() {
  const shown = bins();
  const width = store.run.widths_s?.[chosen.range] ?? 1;
  if (shown.length < 3) return [[], []];
  const byBin = new Map(shown.map((b) => [Math.round(b.at_s / width), b.tokens]));
  const from = Math.round(shown[0].at_s / width), to = Math.round(shown.at(-1).at_s / width);
  const over = Math.max(2, Math.ceil((6 * (store.run.round_gap_s ?? 1)) / width), Math.round((to - from) / 120));
  const xs = [], ys = [];
  let sum = 0;
  for (let bin = from; bin < to; bin++) {
    sum += byBin.get(bin) ?? 0;
    if (bin - over >= from) sum -= byBin.get(bin - over) ?? 0;
    if (bin - from + 1 >= over) {
      xs.push(bin * width);
      ys.push(sum / (over * width));
    }
  }
  return [xs, ys];
}

// A learner that was cut off for long sends all it did at once: the rest stays legible, and what
// is above the chart's top is said in its caption.
export function top(values) {
  const sorted = values.filter((v) => v !== null).sort((a, b) => a - b);
  const most = sorted.at(-1) ?? 1, usual = sorted[Math.floor(0.95 * (sorted.length - 1))] ?? 1;
  return Math.max(1, 1.1 * (most > 3 * usual && usual > 0 ? 1.5 * usual : most));
}

// As long as the ticks are apart, so much of a time is told.
function times(_, splits, axis, space, apart_s) {
  return splits.map((at_s) => {
    const d = new Date(1000 * at_s);
    if (apart_s >= 86400) return d.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    return d.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(apart_s < 60 ? { second: "2-digit" } : {}) });
  });
}

function xAxis(axis) {
  const base = { stroke: colour("quiet"), grid: { stroke: colour("faint"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4, size: 28 };
  if (axis === "at_s") return { ...base, space: 84, values: times };
  return { ...base, space: 56, values: (_, splits) => splits.map((v) => count(v)) };
}

function yAxis(values) {
  return { stroke: colour("quiet"), grid: { stroke: colour("faint"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4, size: 46, values: (_, splits, axis, space, apart) => splits.map((v) => (v === null ? "" : values(v, apart))) };
}

const shown = (value, format) => (value === null || value === undefined ? "–" : format(value));

const gaps = (u) => breaks.map((pair) => pair.map((x) => u.valToPos(x, "x", true))); // and none where only the other curve has a point

function lossOptions(width, height) {
  const x = chosen.axis === "at_s" ? "time" : chosen.axis === "step" ? "step" : "tokens";
  return {
    width, height, padding: [8, 24, 0, 0],
    scales: { x: { time: chosen.axis === "at_s" }, y: chosen.log ? { distr: 3 } : { range: (_, lo, hi) => [lo === null ? 0 : lo - 0.05 * Math.max(0.02, hi - lo), hi === null ? 1 : hi + 0.05 * Math.max(0.02, hi - lo)] } },
    axes: [xAxis(chosen.axis), yAxis(tick)],
    cursor: { points: { size: 6 }, drag: { x: true, y: false } },
    series: [
      { label: x, value: (_, v) => shown(v, chosen.axis === "at_s" ? (s) => new Date(1000 * s).toLocaleString("en-GB") : count) },
      { label: "training", stroke: colour("sea"), width: 1.6, gaps, points: { show: false }, value: (_, v) => shown(v, loss) },
      { label: "held-out", stroke: colour("sand"), width: 1.6, gaps, points: { show: true, size: 5, fill: colour("sand") }, value: (_, v) => shown(v, loss) },
    ],
  };
}

function speedOptions(width, height) {
  return {
    width, height, padding: [8, 24, 0, 0],
    scales: { y: { range: (u) => [0, top(u.data[1])] } },
    axes: [xAxis("at_s"), yAxis(count)],
    cursor: { points: { size: 6 }, drag: { x: true, y: false } },
    series: [
      { label: "time", value: (_, v) => shown(v, (s) => new Date(1000 * s).toLocaleString("en-GB")) },
      { label: "tokens/s", stroke: colour("sky"), width: 1.6, fill: `${colour("sky")}24`, points: { show: false }, value: (_, v) => shown(v, count) },
    ],
  };
}

class Chart {
  constructor(id, options, data) {
    this.box = $(id);
    this.options = options;
    this.data = data;
    this.plot = null;
    this.drawn_ms = 0;
    this.waiting = false;
    this.seen = true;
    new ResizeObserver(() => this.fit()).observe(this.box);
    new IntersectionObserver(([e]) => {
      this.seen = e.isIntersecting;
      if (this.seen) this.draw();
    }).observe(this.box);
  }

  size() {
    return [Math.max(120, this.box.clientWidth), Math.max(90, this.box.clientHeight)];
  }

  fit() {
    const [width, height] = this.size();
    if (this.plot && (this.plot.width !== width || this.plot.height !== height)) this.plot.setSize({ width, height });
  }

  clear() {
    this.plot?.destroy();
    this.plot = null;
  }

  again() {
    this.clear();
    this.now();
  }

  draw() {
    if (this.waiting || !this.seen) return;
    this.waiting = true;
    setTimeout(() => { this.waiting = false; this.now(); }, Math.max(0, DRAW_MS - (performance.now() - this.drawn_ms)));
  }

  now() {
    this.drawn_ms = performance.now();
    const data = this.data();
    $(this.box.id.replace("chart", "none")).hidden = data[0].length > 0;
    if (this.plot === null) {
      if (data[0].length) this.plot = new uPlot(this.options(...this.size()), data, this.box);
      return;
    }
    // Where somebody has zoomed in, the picture stays as it is.
    const zoomed = this.plot.scales.x.min > this.plot.data[0][0] || this.plot.scales.x.max < this.plot.data[0].at(-1);
    this.plot.setData(data, !zoomed);
    if (zoomed) this.plot.redraw();
  }
}

const lossChart = new Chart("loss-chart", lossOptions, lossData);
const speedChart = new Chart("speed-chart", speedOptions, speedData);

function tell() {
  const { run } = store;
  say($("loss-words"), `Training loss ${loss(run.loss)} at step ${count(run.step)}; newest held-out loss ${loss(run.held_out)}.`);
  const peak = Math.max(0, ...(speedChart.plot?.data[1] ?? []));
  say($("speed-peak"), speedChart.plot && peak > top(speedChart.plot.data[1]) ? `peak ${count(peak)}, above the chart` : "");
  say($("speed-words"), `${count(run.tokens_per_s)} tokens per second now; ${bytes(run.bytes_up)} sent up in ${duration(run.wall_s ?? Math.max(0, now() - store.facts.created_s))}.`);
}

function save(place, name, chart, columns) {
  offer($(place), name, () => picture(name, chart.plot?.width ?? 300, chart.plot?.height ?? 60, (c) => {
    if (chart.plot) c.drawImage(chart.plot.ctx.canvas, 0, 0, chart.plot.width, chart.plot.height);
  }), () => [columns(), ...(chart.plot ? chart.plot.data[0].map((_, i) => chart.plot.data.map((of) => of[i])) : [])]);
}
save("curves-head", "loss", lossChart, () => [{ step: "step", total: "tokens", at_s: "s since 1970" }[chosen.axis], "training loss", "held-out loss"]);
save("speed-head", "throughput", speedChart, () => ["s since 1970", "tokens/s merged"]);

export function redraw() {
  lossChart.again();
  speedChart.again();
}

function choose(attribute, name) {
  for (const button of document.querySelectorAll(`[data-${attribute}]`)) {
    button.addEventListener("click", () => {
      chosen[name] = button.dataset[attribute];
      for (const other of document.querySelectorAll(`[data-${attribute}]`)) other.setAttribute("aria-pressed", String(other === button));
      redraw();
    });
  }
}
choose("axis", "axis");
choose("range", "range");
$("log-y").addEventListener("click", () => {
  chosen.log = !chosen.log;
  $("log-y").setAttribute("aria-pressed", String(chosen.log));
  redraw();
});
leave(() => { lossChart.clear(); speedChart.clear(); }); // with what somebody had zoomed in to
listen(["curve_run", "curve_day", "curve_hour", "evaluations"], () => { lossChart.draw(); speedChart.draw(); });
listen(["run"], tell);
