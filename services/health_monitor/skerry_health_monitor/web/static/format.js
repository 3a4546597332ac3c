// Numbers and times for people.

export function count(n) {
  if (n === null || n === undefined) return "–";
  const a = Math.abs(n);
  if (a < 1e4) return Math.round(n).toLocaleString("en");
  for (const [size, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (a >= size) return `${short(n / size)}${unit}`;
  }
  return String(n);
}

export function whole(n) {
  return n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en");
}

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  const a = Math.abs(n);
  for (const [size, unit] of [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (a >= size) return `${short(n / size)} ${unit}`;
  }
  return `${Math.round(n)} B`;
}

function short(x) {
  const a = Math.abs(x);
  return a >= 100 ? x.toFixed(0) : a >= 10 ? x.toFixed(1) : x.toFixed(2);
}

export function loss(x, digits = 3) {
  return x === null || x === undefined ? "–" : x.toFixed(x >= 100 ? 1 : digits);
}

// A loss as a tick's label: with so many digits that no two ticks, this far apart, have the same.
export function tick(x, apart) {
  const digits = apart > 0 ? Math.ceil(-Math.log10(apart) - 1e-9) : 0;
  return x.toFixed(Math.min(9, Math.max(x < 10 ? 2 : 0, digits)));
}

export function percent(x, digits = 0) {
  return x === null || x === undefined ? "–" : `${(100 * x).toFixed(digits)} %`;
}

// 0.21 s, 12 s, 3 min, 5 h 12 min, 2 d 4 h
export function duration(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0) s = 0;
  if (s < 0.0995) return `${Math.round(1000 * s)} ms`;
  if (s < 9.95) return `${s.toFixed(s < 0.995 ? 2 : 1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// Ages jump by whole seconds, so that a page of them does not flicker.
export function age(s) {
  return s === null || s === undefined ? "–" : s < 1 ? "now" : duration(s < 10 ? Math.floor(s) + 1e-9 : s).replace(".0 s", " s");
}

export function ago(s) {
  const told = age(s);
  return told === "now" || told === "–" ? told : `${told} ago`;
}

export function clock(at_s) {
  if (!at_s) return "–";
  return new Date(1000 * at_s).toLocaleTimeString("en-GB");
}

export function moment(at_s) {
  if (!at_s) return "–";
  const d = new Date(1000 * at_s);
  const pad = (n, l = 2) => String(n).padStart(l, "0");
  return `${d.getFullYear()}-${pad(d.getMonth() + 1)}-${pad(d.getDate())} ${pad(d.getHours())}:${pad(d.getMinutes())}:${pad(d.getSeconds())}.${pad(d.getMilliseconds(), 3)}`;
}

// What stays of a sentence while it grows older: without durations, shares and counts. A number
// within a name stays, and so does of how many more something is said.
export function gist(text) {
  return text.replace(/(?<![\w.-])\d+(\.\d+)?(%| (s|min|h|d)\b)?(?!\w|[.-]\w| more)/g, "…");
}

export function words(name) {
  return String(name).replaceAll("_", " ");
}
