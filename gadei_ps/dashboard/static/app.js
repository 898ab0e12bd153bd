"use strict";
// Live parts of the pages: streams of server-sent events, curves by uPlot, export as PNG.

const $ = (id) => document.getElementById(id);
const MOST_POINTS = 8000; // kept in the page; then every second one of the older half goes
const HEIGHT = 210, LEAST_WIDTH = 240; // of a chart, CSS pixels
const COLOURS = { failover: "--bad", death: "--bad", eviction: "--bad", "checkpoint failed": "--bad",
  set: "--b", checkpoint: "--good", attach: "--quiet", detach: "--quiet" };
const ORDER = ["loss", "accuracy", "samples_per_s", "gradients_per_s", "staleness", "queue", "learners", "learning_rate"];
const WHOLE = new Set(["queue", "learners"]);
const WHOLE_STEPS = [...Array(13).keys()].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));
const DRAWN = new Set(["set", "failover", "death", "eviction", "checkpoint", "checkpoint failed", "adoption"]);

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function banner(text) {
  $("banner").textContent = text;
  $("banner").hidden = !text;
}

// step: between the ticks of an axis, which get enough digits to differ.
function shortened(value, step = Infinity) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value), digits = Math.min(17, Math.ceil(Math.log10(size / step)) + 2);
  if (size >= 1e4 && size < 1e15) {
    return value.toLocaleString("en", { maximumFractionDigits: Math.max(0, 1 - Math.floor(Math.log10(step))) });
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(Math.max(2, digits - 1));
  return String(Number(value.toPrecision(Math.max(5, digits))));
}

// Local time, as in the tables: 11-27 11:34:23.
const when = (seconds) => uPlot.fmtDate("{MM}-{DD} {HH}:{mm}:{ss}")(new Date(Math.round(seconds * 1000)));

// Ticks of a time axis, by their distance (s). Below the first one, and the first one of another day, is the date.
const CLOCK = [[86400, "{MM}-{DD}", ""], [60, "{HH}:{mm}"], [1, "{HH}:{mm}:{ss}"], [0.001, "{HH}:{mm}:{ss}.{fff}"]]
  .map(([least, text, day = "\n{MM}-{DD}"]) => [least, text, null, null, day, null, null, null, 1]);

function named(name) {
  return name.replaceAll("_per_s", "/s").replaceAll("_", " ");
}

// -- data ----------------------------------------------------------------------------------------

// Values by names that scripts choose: of `constructor`, an ordinary object has one already.
const own = (values) => Object.setPrototypeOf(values, null);

class Run {
  constructor(data) {
    this.time = data.time;
    this.version = data.version;
    this.series = own(data.series);
    this.events = data.events;
    this.until = data.time.at(-1) ?? 0; // the stream may have earlier points, too
  }

  add(point) {
    const before = this.time.length, values = own(point.values);
    this.time.push(point.time);
    this.version.push(point.version);
    for (const name of new Set([...Object.keys(this.series), ...Object.keys(values)])) {
      this.series[name] ??= new Array(before).fill(null);
      this.series[name].push(values[name] ?? null);
    }
    if (this.time.length > MOST_POINTS) this.thin();
  }

  thin() {
    const half = this.time.length / 2;
    const keep = (_, at) => at > half || at % 2 === 0;
    this.time = this.time.filter(keep);
    this.version = this.version.filter(keep);
    for (const name in this.series) this.series[name] = this.series[name].filter(keep);
  }

  // Longest time between two points that is not a gap: see monitoring/series.py.
  get longest() {
    const steps = this.time.slice(1).map((one, at) => one - this.time[at]).sort((a, b) => a - b);
    return Math.max((this.time.at(-1) - this.time[0]) / 100, 5 * steps[steps.length >> 1]);
  }

  // Points of one curve, in the order of the axis: a run that was restored goes back in versions.
  curve(name, axis, since) {
    const xs = [], ys = [], values = this.series[name] ?? [], longest = axis === "time" ? this.longest : Infinity;
    let last = -Infinity;
    values.forEach((value, at) => {
      const x = axis === "version" ? this.version[at] : this.time[at] - since;
      if (xs.length && this.time[at] - this.time[at - 1] > longest) { last = (last + x) / 2; xs.push(last); ys.push(null); }
      if (value === null || x === null || x === undefined) return;
      while (axis === "version" && xs.length && x < last) { xs.pop(); ys.pop(); last = xs.at(-1) ?? -Infinity; }
      if (x < last) return;
      xs.push(x);
      ys.push(value);
      last = x;
    });
    return [xs, ys];
  }
}

function smoothed(values) {
  let mean = null;
  return values.map((value) => (mean = mean === null || value === null ? value : 0.95 * mean + 0.05 * value));
}

// -- charts --------------------------------------------------------------------------------------

class Charts {
  constructor(root, runs, labels) {
    this.root = root;
    this.runs = runs;
    this.labels = labels;
    this.plots = new Map();
    this.asked = false;
    for (const id of ["axis", "smooth"]) $(id).addEventListener("change", () => this.rebuild());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
    addEventListener("resize", () => this.resize());
    this.draw();
  }

  get axis() { return $("axis").value; }

  names() {
    const all = new Set(this.runs.flatMap((run) => Object.keys(run.series)));
    const place = (name) => (ORDER.indexOf(name) + 1 || (name.includes("loss") ? 1.5 : 2.5));
    return [...all].sort((a, b) => place(a) - place(b) || a.localeCompare(b));
  }

  data(name) {
    const since = (run) => (this.runs.length > 1 ? run.time[0] : 0);
    const tables = this.runs.map((run) => {
      const [xs, ys] = run.curve(name, this.axis, since(run));
      return [xs, $("smooth").checked ? smoothed(ys) : ys];
    });
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  }

  options(name, box) {
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    const isTime = this.axis === "time" && this.runs.length === 1, isWhole = WHOLE.has(name);
    const unit = this.axis === "time" ? " s" : "";
    const ticks = (after) => (_, marks, at, space, step) => marks.map((mark) => shortened(mark, step) + after);
    const x = {
      ...axis, space: 90, ...(this.axis === "version" && { incrs: WHOLE_STEPS }),
      values: isTime ? CLOCK : ticks(unit),
    };
    const y = {
      ...axis, ...(isWhole && { incrs: WHOLE_STEPS }),
      values: ticks(""),
      size: (_, texts) => Math.max(66, 18 + 7 * Math.max(0, ...(texts ?? []).map((one) => one.length))),
    };
    const range = (_, low, high) => {
      if (low === null) return [null, null];
      const isFromZero = isWhole || (low === 0 && high === 0);
      return uPlot.rangeNum(isFromZero ? 0 : low, isFromZero ? Math.max(1, high) : high, 0.1, true);
    };
    return {
      width: Math.max(LEAST_WIDTH, box.clientWidth), height: HEIGHT,
      scales: { x: { time: isTime }, y: { range } },
      cursor: { sync: { key: "gadei-ps" } },
      axes: [x, y],
      series: [
        { label: this.axis, value: (_, at) => (at === null ? "" : isTime ? when(at) : shortened(at) + unit) },
        ...this.labels.map((label, at) => ({
          label: label || named(name), stroke: colour(at ? "--b" : "--a"), width: 1.5,
          value: (_, value) => shortened(value),
        })),
      ],
      hooks: { draw: [(plot) => this.mark(plot)] },
    };
  }

  // Lines at events.
  mark(plot) {
    if (this.runs.length > 1) return;
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const event of this.runs[0].events) {
      const at = this.axis === "version" ? event.version : event.time;
      if (!DRAWN.has(event.kind) || at < plot.scales.x.min || at > plot.scales.x.max) continue;
      const x = Math.round(plot.valToPos(at, "x", true));
      ctx.strokeStyle = colour(COLOURS[event.kind] ?? "--quiet");
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  draw() {
    this.asked = false;
    const tables = this.names().map((name) => [name, this.data(name)]).filter(([, data]) => data[0].length);
    const fresh = tables.filter(([name]) => !this.plots.has(name));
    for (const [name] of fresh) {
      const box = document.createElement("div");
      box.className = "chart";
      box.setAttribute("role", "img");
      box.append(Object.assign(document.createElement("h3"), { textContent: named(name) }));
      this.root.append(box);
      this.plots.set(name, { box });
    }
    // Only now it is known how wide they are.
    for (const [name, data] of fresh) {
      const one = this.plots.get(name);
      one.plot = new uPlot(this.options(name, one.box), data, one.box);
    }
    if (fresh.length) this.resize();
    for (const [name, data] of tables) {
      const { box, plot } = this.plots.get(name);
      plot.setData(data);
      const [first] = data[0]; // uPlot would draw three years around a single point
      if (data[0].length === 1) plot.setScale("x", { min: first - 1, max: first + 1 });
      const last = data.slice(1).map((values) => shortened(values.findLast((one) => one != null))).join(" and ");
      box.setAttribute("aria-label", `${named(name)}: ${data[0].length} points, last value ${last}`);
    }
    this.summarize();
  }

  summarize() {
    const parts = [];
    for (const name of this.names()) {
      const ends = this.runs.map((run) => (run.series[name] ?? []).filter((one) => one !== null));
      if (ends[0].length && ORDER.slice(0, 4).includes(name)) {
        parts.push(`${named(name)} ` + ends.map((all) => `${shortened(all[0])} → ${shortened(all.at(-1))}`).join(" and "));
      }
    }
    $("summary").textContent = parts.join("; ") || "No point yet: the curves begin with the first gradients.";
  }

  soon() {
    if (!this.asked) { this.asked = true; requestAnimationFrame(() => this.draw()); }
  }

  rebuild() {
    for (const { plot, box } of this.plots.values()) { plot.destroy(); box.remove(); }
    this.plots.clear();
    this.draw();
  }

  resize() {
    for (const { plot, box } of this.plots.values()) plot.setSize({ width: Math.max(LEAST_WIDTH, box.clientWidth), height: HEIGHT });
  }

  // All charts, one below the other, as they are on the page.
  png() {
    const all = [...this.plots.values()].map(({ box, plot }) => [box.firstElementChild.textContent, plot.ctx.canvas]);
    const scale = devicePixelRatio, head = 26 * scale;
    const made = document.createElement("canvas");
    made.width = Math.max(...all.map(([, canvas]) => canvas.width));
    made.height = all.reduce((sum, [, canvas]) => sum + canvas.height + head, 0);
    const ctx = made.getContext("2d");
    ctx.fillStyle = colour("--back");
    ctx.fillRect(0, 0, made.width, made.height);
    ctx.fillStyle = colour("--front");
    ctx.font = `${14 * scale}px system-ui, sans-serif`;
    let y = 0;
    for (const [title, canvas] of all) {
      ctx.fillText(title, 10 * scale, y + 18 * scale);
      ctx.drawImage(canvas, 0, y + head);
      y += canvas.height + head;
    }
    made.toBlob((blob) => {
      const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `${this.root.dataset.name}.png` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }
}

// -- events --------------------------------------------------------------------------------------

function list(events) {
  if (!$("events")) return;
  for (const event of events) {
    const item = document.createElement("li");
    const time = Object.assign(document.createElement("time"), { textContent: when(event.time) });
    time.dateTime = new Date(event.time * 1000).toISOString();
    const version = !event.is_exact || event.version === null ? "" : ` (version ${event.version.toLocaleString("en")})`;
    item.append(time, event.text + version);
    item.className = event.kind;
    $("events").prepend(item);
  }
}

// -- streams -------------------------------------------------------------------------------------

const waiting = new Map(); // parts that are replaced once no button in them is held down

function swap(id, html) {
  const place = $(id), focused = document.activeElement?.id;
  if (!place) return;
  waiting.delete(id);
  if (place.matches(":active")) { waiting.set(id, html); return; }
  const inside = focused && place.contains(document.activeElement);
  place.innerHTML = html;
  if (window.htmx) htmx.process(place);
  if (inside) $(focused)?.focus();
}

// After the click, which follows at once.
addEventListener("pointerup", () => setTimeout(() => waiting.forEach((html, id) => swap(id, html))));

// Only this page has the curves of a job without a history.
const isAlone = () => $("charts")?.dataset.source === "";

class Stream {
  constructor(url) {
    this.url = url;
    document.addEventListener("visibilitychange", () => (document.hidden && !isAlone() ? this.close() : this.open()));
    if (!document.hidden) this.open();
  }

  // A hidden page can read later what it has missed; browsers allow few connections to one host.
  close() { this.source?.close(); this.source = null; }

  open() {
    if (this.source || this.ended) return;
    this.source = new EventSource(this.url);
    this.source.addEventListener("update", (message) => this.update(JSON.parse(message.data)));
    this.source.addEventListener("ended", async () => {
      this.ended = true;
      this.close();
      await (this.loaded ??= load());
      banner(`The job has ended; ${isAlone() ? "it kept no history" : "its history is among the runs"}.`);
    });
    this.source.onerror = () => {
      const refused = this.source.readyState === EventSource.CLOSED; // a browser does not try again
      banner(refused ? "The dashboard has refused this page: reload it, or open the newest link." :
        "The connection to the dashboard is lost; trying again.");
      this.loaded ??= load();
    };
    this.source.onopen = () => { banner(""); this.loaded = null; };
  }

  async update(message) {
    for (const [id, html] of Object.entries(message.html ?? {})) swap(id, html);
    // The stream begins where the history ends: loaded after the first message, they have no gap.
    await (this.loaded ??= load());
    if (!window.shown) return;
    const run = shown.runs[0];
    for (const point of message.points ?? []) if (point.time > run.until) run.add(point);
    const known = new Set(run.events.slice(-50).map((one) => one.time + one.text));
    const events = (message.events ?? []).filter((one) => !known.has(one.time + one.text));
    run.events.push(...events);
    list(events);
    if (message.points || events.length) shown.soon();
  }
}

async function fetched(url) {
  const reply = await fetch(url);
  if (!reply.ok) throw new Error(await reply.text());
  return new Run(await reply.json());
}

// If that fails, the curves on the page stay.
async function load() {
  try {
    if ($("charts")) await draw($("charts"));
  } catch (error) { banner(`The curves cannot be loaded: ${error.message}`); }
}

async function draw(root) {
  const urls = [root.dataset.source, root.dataset.other].filter(Boolean);
  const runs = urls.length ? await Promise.all(urls.map(fetched)) : [new Run({ time: [], version: [], series: {}, events: [] })];
  const chosen = [...document.querySelectorAll("select[name]")].map((one) => one.selectedOptions[0].textContent);
  if (window.shown) {
    shown.runs = runs;
    shown.rebuild();
  } else {
    window.shown = new Charts(root, runs, runs.map((_, at) => chosen[at] ?? ""));
    $("png").addEventListener("click", () => shown.png());
  }
  if ($("events")) { $("events").replaceChildren(); list(runs[0].events); }
}

addEventListener("DOMContentLoaded", () => {
  const url = document.body.dataset.stream;
  if (url) window.stream = new Stream(url);
  else load();
});
