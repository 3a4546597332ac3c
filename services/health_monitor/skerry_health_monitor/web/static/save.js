// Every chart as a picture and as a table of numbers: PNG and CSV, made in the browser.
import { colour, el } from "./dom.js";
import { store } from "./store.js";

const SCALE = 2;

// Rows of a chart as CSV; a text that a spreadsheet would take for a formula is quoted.
export function csv(rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    const plain = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

// A canvas of that many CSS pixels, on the page's ground and with a title.
export function picture(title, width, height, draw) {
  const made = el("canvas", { width: Math.round(width * SCALE), height: Math.round((height + 28) * SCALE) });
  const context = made.getContext("2d");
  context.scale(SCALE, SCALE);
  context.fillStyle = colour("panel");
  context.fillRect(0, 0, width, height + 28);
  context.fillStyle = colour("ink");
  context.font = "600 13px system-ui, sans-serif";
  context.fillText(`${store.facts.run ?? "Skerry"}: ${title}`, 10, 19, width - 20);
  context.translate(0, 28);
  draw(context);
  return made;
}

function save(name, blob) {
  const address = URL.createObjectURL(blob);
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// Puts the two buttons at the end of a heading; ``draw`` returns a canvas, ``rows`` the table with its head.
export function offer(place, name, draw, rows) {
  const file = (ending) => `${store.facts.run ?? "skerry"}-${name}.${ending}`;
  const button = (text, onclick) => el("button", { type: "button", "aria-label": `${text}: save ${name}`, title: `save ${name} as ${text}`, onclick }, text);
  place.append(el("span", { class: "save" },
    button("PNG", () => draw().toBlob((blob) => save(file("png"), blob), "image/png")),
    button("CSV", () => save(file("csv"), new Blob([csv(rows())], { type: "text/csv" })))));
}
