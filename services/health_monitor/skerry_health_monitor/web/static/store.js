// What the monitor has told: kept as it comes, whole first, then changes.

const KEYED = ["learners", "lanes", "rounds", "open", "fragments", "checkpoints", "evaluations",
  "samples", "alerts", "streams", "curve_run", "curve_day", "curve_hour"];
const MARKS_S = 900;
const HIDDEN_MS = 1000;
const AGAIN_MS = 1500;
const SILENT_MS = 6000; // three beats: a connection may be dead without a word
const FIRST_MS = 30000; // the whole picture may take longer on its way

export const store = {
  run: {}, facts: {}, name: "", state: "connecting", offset_s: 0, patient_ms: 0, ended: false,
  ...Object.fromEntries(KEYED.map((name) => [name, new Map()])),
  marks: new Map(), // learner number -> [[at_s, late], …], oldest first
};

export const now = () => Date.now() / 1000 + store.offset_s;

const listeners = new Set();
let dirty = new Set();
let asked = false;

// ``unseen`` is called while the page is hidden, too: its title is read in the row of tabs.
export function listen(sections, render, unseen = false) {
  listeners.add({ sections: new Set(sections), render, unseen });
}

function render() {
  const changed = dirty, { hidden } = document;
  asked = false;
  if (!hidden) dirty = new Set(); // what a hidden page has left out is due once it is seen
  for (const { sections, render: part, unseen } of listeners) {
    if ((unseen || !hidden) && (changed.has("all") || [...sections].some((s) => changed.has(s)))) part(changed);
  }
}

const leavers = [];

// What a part keeps for itself of one run means nothing in the next, which counts from one again.
export function leave(forget) {
  leavers.push(forget);
}

// One render for all that came since the last frame. A hidden page gets no frames.
function ask() {
  if (asked) return;
  asked = true;
  if (document.hidden) setTimeout(render, HIDDEN_MS);
  else requestAnimationFrame(render);
}

// A frame that was asked for just before hiding comes only when the page is seen again.
document.addEventListener("visibilitychange", () => {
  asked = false;
  if (dirty.size) ask();
});

export function touch(...sections) {
  for (const section of sections) dirty.add(section);
  ask();
}

function row(section, values) {
  const columns = store.facts.columns?.[section];
  if (!columns || section === "lanes") return values;
  const made = {};
  for (let i = 0; i < columns.length; i++) made[columns[i]] = values[i];
  return made;
}

function put(section, changes) {
  const plain = section === "run" || section === "facts";
  const held = store[section];
  if (held === undefined) return;
  for (const [key, value] of Object.entries(changes.set ?? {})) {
    if (plain) held[key] = value;
    else held.set(key, row(section, value));
  }
  for (const key of changes.del ?? []) {
    if (plain) delete held[key];
    else held.delete(key);
  }
  dirty.add(section);
}

function take(marks) {
  const oldest = now() - MARKS_S;
  for (const [, learner, at_s, late] of marks) {
    let held = store.marks.get(learner);
    if (!held) store.marks.set(learner, (held = []));
    held.push([at_s, late]);
    if (held[0][0] < oldest) store.marks.set(learner, held.filter(([at]) => at >= oldest));
  }
  if (marks.length) dirty.add("marks");
}

function heard(data) {
  store.patient_ms = Date.now() + SILENT_MS; // a clock that goes on while a laptop sleeps
  store.offset_s = data.now_s - Date.now() / 1000;
  store.name = data.run;
}

function state(to) {
  if (store.state !== to) {
    store.state = to;
    touch("state");
  }
}

function whole(data) {
  heard(data);
  const another = store.facts.created_s !== data.sections.facts.created_s;
  store.run = {};
  store.facts = data.sections.facts;
  for (const name of KEYED) store[name].clear();
  store.marks.clear();
  if (another) for (const forget of leavers) forget();
  for (const [section, rows] of Object.entries(data.sections)) {
    if (section !== "facts") put(section, { set: rows });
  }
  take(data.marks);
  store.ended = false;
  state("live");
  touch("all");
}

function change(data) {
  heard(data);
  for (const [section, changes] of Object.entries(data.sections)) put(section, changes);
  take(data.marks);
  state("live");
  ask();
}

let source = null;

function lost() {
  source?.close();
  if (source) setTimeout(connect, AGAIN_MS);
  source = null;
  state("away");
}

setInterval(() => {
  if (source && Date.now() > store.patient_ms) lost();
}, 1000);

export function connect() {
  store.patient_ms = Date.now() + FIRST_MS;
  source = new EventSource("/api/stream");
  source.addEventListener("whole", (e) => whole(JSON.parse(e.data)));
  source.addEventListener("change", (e) => change(JSON.parse(e.data)));
  source.addEventListener("waiting", (e) => {
    heard(JSON.parse(e.data));
    state("waiting");
  });
  source.addEventListener("end", () => {
    store.ended = true;
    touch("state");
  });
  source.addEventListener("beat", (e) => heard(JSON.parse(e.data)));
  source.addEventListener("error", lost);
}
