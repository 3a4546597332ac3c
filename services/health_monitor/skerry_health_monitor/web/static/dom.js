// The page is built with these alone: text only ever becomes text, whatever it holds.

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

export function svg(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// A row's cell: who listens hears its column's name before what it holds.
export function cell(name, kind, ...inside) {
  return el("span", { class: kind }, el("span", { class: "hidden" }, ` ${name} `), ...inside);
}

// Writing what is there already would cost a layout.
export function say(node, text) {
  if (node.said !== text) {
    node.said = text;
    node.textContent = text;
  }
}

export function mark(node, name, value) {
  if (node.dataset[name] !== value) node.dataset[name] = value;
}

// Keeps a list's rows in the order of keys; rows are made once, and moved only where they must be.
export class Rows {
  constructor(list, make) {
    this.list = list;
    this.make = make;
    this.rows = new Map();
  }

  show(keys) {
    const wanted = new Set(keys);
    for (const [key, row] of this.rows) {
      if (!wanted.has(key)) {
        row.node.remove();
        row.gone?.();
        this.rows.delete(key);
      }
    }
    const focused = this.list.contains(document.activeElement) ? document.activeElement : null;
    let place = this.list.firstElementChild;
    for (const key of keys) {
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, (row = this.make(key)));
      if (row.node === place) place = place.nextElementSibling;
      else this.list.insertBefore(row.node, place);
    }
    // A node that is moved loses the focus, and who reads by keyboard their place.
    if (focused?.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
  }
}

// Up, down, home and end go from row to row; Tab leaves the list.
export function roving(list) {
  const stops = () => [...list.querySelectorAll("[data-row]")];
  list.addEventListener("focusin", (e) => {
    const row = e.target.closest("[data-row]");
    if (!row) return;
    for (const other of list.querySelectorAll('[data-row][tabindex="0"]')) if (other !== row) other.tabIndex = -1;
    row.tabIndex = 0;
  });
  list.addEventListener("keydown", (e) => {
    const step = { ArrowDown: 1, ArrowUp: -1, Home: -1e9, End: 1e9, PageDown: 10, PageUp: -10 }[e.key];
    if (!step) return;
    const all = stops();
    const at = all.indexOf(document.activeElement);
    if (at < 0) return;
    e.preventDefault();
    all[Math.max(0, Math.min(all.length - 1, at + step))].focus();
  });
}

export function firstStop(list) {
  if (!list.querySelector('[data-row][tabindex="0"]')) {
    const first = list.querySelector("[data-row]");
    if (first) first.tabIndex = 0;
  }
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A canvas as wide as its box; returns its context, scaled to CSS pixels.
export function canvas(node) {
  const dpr = Math.min(2, window.devicePixelRatio || 1);
  const width = node.clientWidth, height = node.clientHeight;
  if (node.width !== Math.round(width * dpr) || node.height !== Math.round(height * dpr)) {
    node.width = Math.round(width * dpr);
    node.height = Math.round(height * dpr);
  }
  const context = node.getContext("2d");
  context.setTransform(dpr, 0, 0, dpr, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
