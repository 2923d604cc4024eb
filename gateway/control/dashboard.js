// The live page: it follows /-/events and draws what comes. Everything shown is put in as text, never as markup.

const WINDOW = 300; // seconds that the plots show at most
const WINDOWS = [60, 120, WINDOW]; // the shortest that holds all points is taken
const SILENCE = 5000; // ms without a sample after which a connection counts as dead: a suspended laptop, a stuck tunnel
const RETRY = [500, 1000, 2000, 4000]; // ms before the next attempt; the last one stays
const BUSY_RETRY = 10000; // ms, when as many as may watch are watching
const UNSEEN = 30000; // ms in the background after which the page stops asking
const GAP = 4; // seconds between two points that no line joins
const SAID = 8000; // ms that a message stays

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function draw(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Only what has changed is touched: what is selected, or read aloud, stays. */
function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// -- words for numbers ------------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const count = (n) => whole.format(n);
const rate = (n) => (n >= 10 || n === 0 ? count(n) : n.toFixed(1));

/** Of a measured duration: three digits, as 0.42 ms, 52 ms, 1.25 s. */
function duration(seconds) {
  const [value, unit] = seconds < 0.9995 ? [seconds * 1000, "ms"] : [seconds, "s"];
  return `${value === 0 || value >= 100 ? count(value) : Number(value.toPrecision(3))} ${unit}`;
}

/** Of time that goes by: 4.2 s, 3 m 5 s, 2 h 4 m, 3 d 2 h. */
function span(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} m`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

function octets(n) {
  if (n < 1000) return `${n} B`;
  return n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : `${(n / 1e6).toFixed(1)} MB`;
}

// -- plots ------------------------------------------------------------------------------------------------------------

/** One series or two over the last minutes. The arrow keys, or a pointer, choose a moment, whose figures are then told. */
class Plot {
  constructor(figure, { series, stacked, label, tell }) {
    this.figure = figure;
    this.svg = figure.querySelector("svg");
    this.reading = figure.querySelector(".reading");
    this.detail = figure.querySelector(".detail");
    Object.assign(this, { series, stacked, label, tell, points: [], ago: 0, window: WINDOW });
    const title = figure.querySelector("h2").textContent;
    const slider = {
      role: "slider",
      tabindex: 0,
      "aria-label": `${title}, by the moment`,
      "aria-valuemin": -WINDOW,
      "aria-valuemax": 0,
    };
    for (const [key, value] of Object.entries(slider)) this.svg.setAttribute(key, value);
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("pointermove", (event) => this.choose(this.agoAt(event.offsetX)));
    this.svg.addEventListener("pointerleave", () => this.choose(0));
    this.svg.addEventListener("blur", () => this.choose(0));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  key(event) {
    const steps = {
      ArrowLeft: 1,
      ArrowDown: 1,
      ArrowRight: -1,
      ArrowUp: -1,
      PageDown: 30,
      PageUp: -30,
      Home: WINDOW,
      End: -WINDOW,
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.choose(Math.round(this.ago) + steps[event.key]);
  }

  agoAt(x) {
    return this.window * (1 - x / this.svg.clientWidth);
  }

  choose(ago) {
    this.ago = Math.min(Math.max(ago, 0), this.window);
    this.draw();
  }

  show(points) {
    this.points = points;
    const age = points.at(-1).t - points[0].t;
    this.window = WINDOWS.find((seconds) => age < seconds) ?? WINDOW;
    this.svg.setAttribute("aria-valuemin", String(-this.window));
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    const height = this.svg.clientHeight;
    if (!width || !this.points.length) return;
    const now = this.points.at(-1).t;
    const top = ceiling(Math.max(...this.points.map((p) => this.top(p))));
    const x = (t) => (1 - (now - t) / this.window) * width;
    const y = (value) => height - 18 - (value / top) * (height - 36);
    const marks = [top, top / 2].flatMap((value) => [
      draw("line", { class: "grid", x1: 0, x2: width, y1: y(value), y2: y(value) }),
      draw("text", { x: 0, y: y(value) - 4 }, this.label(value)),
    ]);
    marks.push(draw("line", { class: "grid", x1: 0, x2: width, y1: y(0), y2: y(0) }));
    marks.push(draw("text", { x: 0, y: height - 3 }, `${this.window / 60} min ago`));
    marks.push(draw("text", { x: width, y: height - 3, "text-anchor": "end" }, "now"));
    // the first on top: what is stacked on nothing would hide it
    const lines = this.series
      .map((_, index) => this.lines(index, x, y))
      .reverse()
      .flat();
    const chosen = this.at(now - this.ago);
    if (this.ago > 0) {
      const at = x(now - this.ago);
      lines.push(draw("line", { class: "cursor", x1: at, x2: at, y1: 12, y2: height - 18 }));
    }
    this.svg.replaceChildren(...marks, ...lines);
    this.describe(chosen);
  }

  /** The point nearest to a moment, if there is one close to it. */
  at(t) {
    let best = null;
    for (const point of this.points) if (!best || Math.abs(point.t - t) < Math.abs(best.t - t)) best = point;
    return best && Math.abs(best.t - t) <= GAP ? best : null;
  }

  value(point, index) {
    const value = this.series[index].of(point);
    return value !== null && this.stacked && index ? value + this.series[0].of(point) : value;
  }

  top(point) {
    return Math.max(...this.series.map((_, index) => this.value(point, index) ?? 0));
  }

  lines(index, x, y) {
    const { name, area } = this.series[index];
    const runs = [];
    let last = null;
    for (const point of this.points) {
      const value = this.value(point, index);
      if (value === null) continue;
      if (last === null || point.t - last > GAP) runs.push([]);
      runs.at(-1).push([x(point.t), y(value), this.stacked && index ? y(this.value(point, 0)) : y(0)]);
      last = point.t;
    }
    const to = (points) => points.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join("L");
    const paths = runs.map((run) =>
      draw("path", { class: `${name} ${area ? "solid" : ""}`, d: run.length > 1 ? `M${to(run)}` : `M${to(run)}h0.1` }),
    );
    if (!area) return paths;
    const fills = runs.map((run) =>
      draw("path", { class: `fill ${name}`, d: `M${to(run)}L${to(run.map(([px, , base]) => [px, base]).reverse())}Z` }),
    );
    return [...fills, ...paths];
  }

  describe(point) {
    const when = this.ago >= 1 ? `${span(Math.round(this.ago)).replace(".0", "")} ago` : "";
    const [value, unit, details] = point ? this.tell(point) : ["–", "", []];
    const tail = [unit, when && (unit ? `, ${when}` : when)].join("");
    const reading = `${value}|${tail}`;
    if (this.reading.dataset.told !== reading) {
      this.reading.dataset.told = reading;
      this.reading.replaceChildren(value, " ", make("small", {}, tail));
    }
    const told = details.map((d) => d.text).join(", ");
    if (this.detail.dataset.told !== told) {
      this.detail.dataset.told = told;
      this.detail.replaceChildren(...details.map((d) => make("span", { class: d.key ?? "" }, d.text)));
    }
    this.svg.setAttribute("aria-valuenow", String(-Math.round(this.ago)));
    this.svg.setAttribute("aria-valuetext", `${when || "now"}: ${[value, unit, told].filter(Boolean).join(", ")}`);
  }
}

/** The next round number. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 6, 8, 10].map((n) => n * power).find((n) => n >= value * 0.9999);
}

const quantiles = (key) => ({
  series: [
    { name: "first", of: (p) => p[key]?.[0] ?? null },
    { name: "second", of: (p) => p[key]?.[1] ?? null },
  ],
  label: duration,
  tell: (p) =>
    p[key]
      ? [
          duration(p[key][0]),
          "",
          [
            { key: "key", text: "median" },
            { key: "key second", text: `p95 ${duration(p[key][1])}` },
          ],
        ]
      : ["–", "", [{ text: "none in 10 s" }]],
});

const total = (counts) => Object.values(counts).reduce((sum, n) => sum + n, 0);

const endings = (after, until) =>
  points.reduce((sum, p) => (p.t > after && p.t <= until ? sum + total(p.ended) : sum), 0);

let points = []; // of the last minutes, in order

const plots = [
  new Plot($("figure-flight"), {
    stacked: true,
    series: [
      { name: "first", area: true, of: (p) => p.in_flight - p.waiting },
      { name: "second", area: true, of: (p) => p.waiting },
    ],
    label: (n) => (Number.isInteger(n) ? count(n) : ""),
    tell: (p) => [
      count(p.in_flight),
      p.in_flight === 1 ? "request" : "requests",
      [
        { key: "key area", text: `${count(p.in_flight - p.waiting)} streaming` },
        { key: "key area second", text: `${count(p.waiting)} waiting` },
      ],
    ],
  }),
  new Plot($("figure-tokens"), {
    series: [{ name: "first", area: true, of: (p) => p.tokens }],
    label: rate,
    tell: (p) => [rate(p.tokens), "tok/s", [{ text: `${count(endings(p.t - 60, p.t))} endings in a minute` }]],
  }),
  new Plot($("figure-ttft"), quantiles("ttft")),
  new Plot($("figure-tpot"), quantiles("tpot")),
];

// -- tables -----------------------------------------------------------------------------------------------------------

/** Rows that stay the same elements while what they stand for stays: a focus is not lost, a selection neither. */
class Rows {
  constructor(body, build, fill) {
    Object.assign(this, { body, build, fill, rows: new Map() });
  }

  show(items, key) {
    const before = this.rows;
    this.rows = new Map();
    for (const item of items) {
      let name = key(item);
      while (this.rows.has(name)) name += " "; // clients may give one id to two requests
      const row = before.get(name) ?? this.build();
      before.delete(name);
      row.item = item;
      this.fill(row, item);
      this.rows.set(name, row);
    }
    for (const row of before.values()) this.remove(row);
    let place = this.body.firstElementChild;
    for (const row of this.rows.values()) {
      if (row === place) place = place.nextElementSibling;
      else this.body.insertBefore(row, place);
    }
  }

  /** Whoever stood on it with the keyboard goes on from its neighbour. */
  remove(row) {
    if (row.contains(document.activeElement)) {
      const neighbour = row.nextElementSibling ?? row.previousElementSibling;
      (neighbour?.querySelector("button") ?? $("streams")).focus();
    }
    row.remove();
  }
}

function row(cells) {
  return () =>
    make(
      "tr",
      { role: "row" },
      ...cells.map(([name, children, label]) =>
        make("td", { role: "cell", class: name, ...(label && { "data-label": label }) }, ...children()),
      ),
    );
}

const two = () => [make("span", { class: "main" }), make("span", { class: "under" })];
const one = () => [make("span", { class: "main" })];
const word = () => [make("span", { class: "state" })];
const load = () => [make("div", { class: "load" }, make("span"), make("div", { class: "bar" }, make("i")))];

function fillTwo(cell, main, under) {
  write(cell.firstChild, main);
  write(cell.lastChild, under);
  cell.firstChild.title = main;
}

function fillWord(cell, text, kind) {
  write(cell.firstChild, text);
  cell.firstChild.className = `state ${kind}`;
}

function fillLoad(cell, text, share, kind = "") {
  const [number, bar] = cell.firstChild.children;
  write(number, text);
  bar.firstChild.style.width = `${Math.min(share * 100, 100).toFixed(1)}%`;
  bar.firstChild.className = kind;
}

const PHASES = {
  read: ["reading", "soft"],
  queue: ["queued", "warn"],
  connect: ["connecting", "soft"],
  prefill: ["prefill", "soft"],
  wait: ["waiting", "soft"],
  first_token: ["first token", "soft"],
  stream: ["streaming", "good"],
  done: ["ending", "soft"],
};

const streamRows = new Rows(
  $("stream-rows"),
  row([
    ["mono", two],
    ["", two],
    ["", word],
    ["number", one, "Age"],
    ["number", one, "Tokens"],
    ["number", one, "Pace"],
    ["number", two, "Held back"],
    ["", () => [make("button", { type: "button" }, "Abort")]],
  ]),
  (row, s) => {
    const [request, model, phase, age, tokens, pace, held, act] = row.cells;
    fillTwo(request, s.request_id, `${s.method} ${s.path} from ${s.client}`);
    fillTwo(model, s.model ?? "–", s.backend ?? "");
    const [text, kind] = PHASES[s.phase] ?? [s.phase, "soft"];
    fillWord(phase, text, kind);
    write(age.firstChild, span(s.age_s));
    write(tokens.firstChild, s.tokens === null ? (s.bytes_out ? octets(s.bytes_out) : "–") : count(s.tokens));
    const silent = s.silent_s > 3 && !s.paused;
    write(
      pace.firstChild,
      silent ? `silent ${span(s.silent_s)}` : s.tokens_per_s === null ? "–" : `${rate(s.tokens_per_s)}/s`,
    );
    pace.firstChild.className = silent ? "main warn" : "main";
    write(held.firstChild, s.held_back_s ? span(s.held_back_s) : "–");
    write(held.lastChild, s.paused ? "still" : "");
    held.className = s.paused ? "number warn" : "number";
    act.firstChild.setAttribute("aria-label", `Abort ${s.request_id}`);
  },
);

$("stream-rows").addEventListener("click", (event) => {
  if (event.target.matches("button")) ask(event.target.closest("tr").item);
});

const STATES = { up: "good", unknown: "soft", ejected: "warn", trial: "warn", down: "bad" };
let busiest = 1; // in flight on the busiest backend: the full width of a bar without a limit

const backendRows = new Rows(
  $("backend-rows"),
  row([
    ["", two],
    ["", word],
    ["", load, "In flight"],
    ["number", one, "Tok/s"],
    ["number", one, "Connections"],
  ]),
  (row, b) => {
    const [name, state, flight, tokens, connections] = row.cells;
    const more = b.models_total - b.models.length;
    const weight = b.weight === 1 ? "" : `weight ${b.weight}`;
    fillTwo(
      name,
      b.name,
      [b.models.join(", ") + (more > 0 ? ` and ${more} more` : ""), weight].filter(Boolean).join(" · "),
    );
    fillWord(state, b.state, STATES[b.state] ?? "soft");
    const limit = b.max_in_flight;
    fillLoad(
      flight,
      limit ? `${count(b.in_flight)} / ${count(limit)}` : count(b.in_flight),
      b.in_flight / (limit ?? busiest),
      limit && b.in_flight >= limit ? "warn" : "",
    );
    write(tokens.firstChild, rate(b.tokens_per_s));
    write(connections.firstChild, count(b.connections));
  },
);

const OUTCOMES = {
  complete: ["", "the answer came whole"],
  empty: ["soft", "whole, but without output"],
  refused: ["warn", "by the gateway, before anything was sent on"],
  upstream_status: ["warn", "a 4xx or 5xx of the backend’s"],
  stream_error: ["bad", "an error inside the stream"],
  upstream_truncated: ["bad", "the stream’s last event never came"],
  upstream_reset: ["bad", "the backend broke off"],
  upstream_connect: ["bad", "the backend took no connection"],
  timeout_connect: ["bad", "no connection in time"],
  timeout_first_byte: ["bad", "no response in time"],
  timeout_idle: ["bad", "the backend fell silent"],
  timeout_progress: ["bad", "no output for too long"],
  timeout_total: ["bad", "longer than allowed"],
  client_gone: ["soft", "the client left"],
  client_stalled: ["warn", "the client took nothing"],
  draining: ["warn", "aborted here, or at a stop"],
  internal: ["bad", "a fault of the gateway’s own"],
};

const endingRows = new Rows(
  $("ending-rows"),
  row([
    ["", two],
    ["", load],
    ["number", one],
  ]),
  (row, e) => {
    const [outcome, lately, since] = row.cells;
    const [kind, meaning] = OUTCOMES[e.outcome] ?? ["soft", ""];
    fillTwo(outcome, e.outcome, meaning);
    fillLoad(lately, count(e.lately), e.share, kind);
    write(since.firstChild, count(e.since));
  },
);

// -- showing what has come --------------------------------------------------------------------------------------------

let sample = null; // the last one
let frozen = false;

function take(incoming) {
  const known = new Map(points.map((p) => [p.t, p]));
  for (const point of incoming.points) known.set(point.t, point);
  const inOrder = [...known.values()].sort((a, b) => a.t - b.t);
  points = inOrder.filter((p) => p.t > inOrder.at(-1).t - WINDOW);
  sample = incoming;
  if (!frozen && !document.hidden) show();
}

function show() {
  for (const plot of plots) plot.show(points);
  write($("trouble"), sample.trouble ?? "");
  write(
    $("facts"),
    [sample.queued ? `${count(sample.queued)} queued` : "", `up ${span(sample.uptime_s)}`, sample.version]
      .filter(Boolean)
      .join(" · "),
  );
  document.title = `${count(sample.in_flight)} in flight – tokenpipe`;
  showStreams();
  showBackends();
  showEndings();
  $("main").removeAttribute("aria-busy");
}

function showStreams() {
  const { streams, in_flight } = sample;
  streamRows.show(streams, (s) => s.request_id);
  write($("streams-note"), streams.length ? "" : "Nothing is in flight.");
  write(
    $("streams-aside"),
    in_flight > streams.length ? `the ${count(streams.length)} longest of ${count(in_flight)}` : "the longest first",
  );
}

function showBackends() {
  const { backends, backends_total } = sample;
  busiest = Math.max(1, ...backends.map((b) => b.in_flight));
  backendRows.show(backends, (b) => b.name);
  write(
    $("backends-note"),
    backends_total > backends.length
      ? `${count(backends.length)} of ${count(backends_total)}, those that are not up first.`
      : "",
  );
}

function showEndings() {
  const lately = {};
  for (const point of points)
    for (const [outcome, n] of Object.entries(point.ended)) lately[outcome] = (lately[outcome] ?? 0) + n;
  const all = Math.max(total(lately), 1);
  const names = new Set([...Object.keys(sample.outcomes), ...Object.keys(lately)]);
  const rows = [...names].map((outcome) => ({
    outcome,
    lately: lately[outcome] ?? 0,
    since: sample.outcomes[outcome] ?? 0,
    share: (lately[outcome] ?? 0) / all,
  }));
  rows.sort((a, b) => b.since - a.since || a.outcome.localeCompare(b.outcome));
  endingRows.show(rows, (e) => e.outcome);
  write($("endings-note"), rows.length ? "" : "Nothing has ended yet.");
}

$("pause").addEventListener("click", () => {
  frozen = !frozen;
  $("pause").setAttribute("aria-pressed", String(frozen));
  tellState();
  if (!frozen && sample) show();
});

// -- aborting a stream ------------------------------------------------------------------------------------------------

let doomed = null; // the stream that is asked about
let silence = 0;

function say(text) {
  clearTimeout(silence);
  write($("said"), text);
  silence = setTimeout(() => write($("said"), ""), SAID);
}

function ask(stream) {
  doomed = stream;
  write(
    $("abort-what"),
    `${stream.request_id}\n${[stream.model, stream.backend].filter(Boolean).join(" on ")}\nfrom ${stream.client}`,
  );
  $("abort").showModal();
}

async function abort(stream) {
  try {
    const answer = await fetch(`streams/${encodeURIComponent(stream.request_id)}`, { method: "DELETE" });
    if (answer.ok) say(`Aborted ${stream.request_id}.`);
    else if (answer.status === 404) say(`${stream.request_id} had ended already.`);
    else say(`Not aborted: ${await reason(answer)}`);
  } catch {
    say("Not aborted: the gateway cannot be reached.");
  }
}

$("abort-no").addEventListener("click", () => $("abort").close());
$("abort-yes").addEventListener("click", () => {
  $("abort").close();
  abort(doomed);
});
$("abort").addEventListener("close", () => {
  if (document.activeElement === document.body) $("streams").focus(); // its row has gone meanwhile
});

// -- following the feed -----------------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** What the gateway says of its refusal. */
async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the gateway answered ${answer.status}`;
  }
}

let state = "connecting";

function tellState(now = state) {
  state = now;
  const words = { connecting: "Connecting", live: "Live", lost: "Reconnecting", idle: "Resting" };
  const shown = frozen && state === "live" ? "paused" : state;
  if ($("connection").dataset.state === shown) return;
  $("connection").dataset.state = shown;
  write($("connection"), shown === "paused" ? "Paused" : words[state]);
  $("main").classList.toggle("stale", state === "lost");
}

function notice(text, button) {
  if ($("notice").dataset.text === text) return;
  $("notice").dataset.text = text;
  $("notice").replaceChildren(text, ...(button ? [button] : []));
  $("notice").hidden = !text;
}

/** Read events until the stream ends, however it does. */
async function follow(alive, signal) {
  const answer = await fetch("events", { signal, cache: "no-store", headers: { Accept: "text/event-stream" } });
  if (!answer.ok) throw new Refused(answer.status, await reason(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (pending + value).split("\n\n");
    pending = events.pop();
    for (const event of events) {
      const data = event
        .split("\n")
        .filter((line) => line.startsWith("data: "))
        .map((line) => line.slice(6));
      if (!data.length) continue;
      alive();
      take(JSON.parse(data.join("\n")));
    }
  }
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Nobody looks at a page in the background: after a while its feed is let go, until somebody does. */
let rest = null;
let hiding = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => rest?.(), UNSEEN);
  else if (sample && !frozen) show();
});

async function seen() {
  while (document.hidden)
    await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

/** One connection. Returns how long to wait for the next, in ms; null: for ever. */
async function attempt(failures) {
  const control = new AbortController();
  let resting = false;
  let watchdog = 0;
  let first = true;
  const alive = () => {
    clearTimeout(watchdog);
    watchdog = setTimeout(() => control.abort(), SILENCE);
    failures = 0;
    if (first) {
      first = false;
      tellState("live");
      notice("");
    }
  };
  rest = () => {
    resting = true;
    control.abort();
  };
  watchdog = setTimeout(() => control.abort(), SILENCE);
  try {
    await follow(alive, control.signal);
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      const again = make("button", { type: "button" }, "Sign in again");
      again.addEventListener("click", () => location.reload());
      tellState("lost");
      notice("The gateway no longer takes the token that was given.", again);
      return { wait: null, failures };
    }
    if (error instanceof Refused) {
      tellState("lost");
      notice(`The gateway sends no events: ${error.message}`);
      return { wait: BUSY_RETRY, failures };
    }
  } finally {
    clearTimeout(watchdog);
    control.abort();
    rest = null;
  }
  if (resting) {
    tellState("idle");
    return { wait: 0, failures: 0 };
  }
  tellState("lost");
  notice(
    sample
      ? "The gateway cannot be reached. What is shown is from before; this page goes on by itself once it is back."
      : "The gateway cannot be reached. This page tries again by itself.",
  );
  return { wait: RETRY[Math.min(failures, RETRY.length - 1)], failures: failures + 1 };
}

let failures = 0;
for (let wait = 0; wait !== null;) {
  await sleep(wait);
  await seen();
  ({ wait, failures } = await attempt(failures));
}
