
// The state of the run: the server sends all of it once ("state"), then what changed ("update").
const S = { stride: 1, summary: null, rows: new Map(), recent: new Map(), values: new Map(), valLoss: [], marks: new Map() };
let R = {}; // column of a range of steps by name
let F = {}; // column of a single step by name
// In their order within a step.
const PHASES = ["data", "forward", "backward", "exposed", "wait", "optimizer", "other"];
const PHASE_NAMES = { exposed: "communication", wait: "wait" };
const PARTS = [{ name: "compute", colour: "compute" }, { name: "communication", colour: "exposed" }, { name: "wait", colour: "wait" }];
const MARKS = {
  members: "members changed", checkpoint: "checkpoint", verdict: "verdict", warning: "warning", fault: "fault", start: "resumed", end: "end", note: "note",
};
const OVER = ["finished", "failed", "interrupted", "unfinished"];
const QUIET = new Set(["note", "end", "start"]);
const MOST_LISTED = 150;
const $ = (id) => document.getElementById(id);

// Text.

function seconds(value) {
  if (value === null || value === undefined) return NONE;
  return value < 1 ? `${number(value * 1e3)} ms` : value < 120 ? `${number(value)} s` : duration(value);
}
function duration(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 60) return `${Math.round(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${number(value / 86400)} days`;
}
function si(value, unit) {
  for (const [factor, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= factor) return `${number(value / factor)} ${prefix}${unit}`;
  return `${number(value)} ${unit}`;
}
function loss(value) { return value === null || value === undefined ? NONE : Math.abs(value) >= 100 ? number(value) : fixed(value, Math.abs(value) < 1 ? 4 : 3); }
function plural(count, noun) { return `${fixed(count, 0)} ${noun}${count === 1 ? "" : "s"}`; }
function clock(at) { return new Date(at * 1e3).toTimeString().slice(0, 8); }

function key(box, name) { return el("span", {}, box, name); }

// Receiving.

function mergeRows(rows, fresh) {
  if (!fresh.length) return rows;
  let end = rows.length;
  while (end && rows[end - 1][0] >= fresh[0][0]) end--;
  return rows.slice(0, end).concat(fresh.filter((row) => row[1] !== null));
}
function addRecent(rank, records) {
  const kept = S.recent.get(rank) ?? new Map();
  for (const record of records) {
    kept.delete(record[0]);
    kept.set(record[0], record);
  }
  while (kept.size > 400) kept.delete(kept.keys().next().value);
  S.recent.set(rank, kept);
}
function takeState(state) {
  S.stride = state.stride;
  R = Object.fromEntries(state.row_fields.map((name, place) => [name, place]));
  F = Object.fromEntries(state.recent_fields.map((name, place) => [name, place]));
  for (const map of [S.rows, S.recent, S.values, S.marks]) map.clear();
  S.valLoss = [];
  takeUpdate(state);
}
function takeUpdate(update) {
  S.summary = update.summary;
  for (const [rank, rows] of Object.entries(update.rows)) S.rows.set(+rank, mergeRows(S.rows.get(+rank) ?? [], rows));
  for (const [rank, records] of Object.entries(update.recent)) addRecent(+rank, records);
  for (const [name, rows] of Object.entries(update.values)) S.values.set(name, mergeRows(S.values.get(name) ?? [], rows));
  S.valLoss = mergeRows(S.valLoss, update.val_loss);
  for (const mark of update.marks) S.marks.set(mark.id, mark);
  draw();
}

function connect() {
  const token = new URLSearchParams(location.search).get("token") ?? "";
  const source = new EventSource(`events?token=${encodeURIComponent(token)}`);
  const listen = (name, take) => source.addEventListener(name, (event) => {
    $("banner").hidden = true;
    take(JSON.parse(event.data));
  });
  listen("state", takeState);
  listen("update", takeUpdate);
  source.onerror = () => {
    const over = S.summary && OVER.includes(S.summary.status);
    $("banner").textContent = over ? "The run and its server have ended. This is the last state." : "No connection to shoal watch: trying again …";
    $("banner").hidden = false;
  };
}

// The run as one series: of every range of steps, the lowest rank that has it.

function wholeRun() {
  const buckets = new Map();
  for (const rank of [...S.rows.keys()].sort((a, b) => b - a)) for (const row of S.rows.get(rank)) buckets.set(row[0], row);
  return [...buckets.values()].sort((a, b) => a[0] - b[0]);
}
let byTime = false;
let whole = [];
const stepOf = (bucket) => bucket * S.stride + (S.stride - 1) / 2;
const xOf = (row) => (byTime ? row[R.time] - S.summary.first_time : stepOf(row[0]));
function rowAt(bucket) {
  let low = 0, high = whole.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    whole[middle][0] < bucket ? (low = middle + 1) : (high = middle);
  }
  return whole[low];
}
function xOfStep(step) {
  const row = byTime && whole.length ? rowAt(Math.floor(step / S.stride)) : null;
  return row ? row[R.time] - S.summary.first_time : step;
}
function xOfMark(mark) {
  if (byTime) return mark.time - S.summary.first_time;
  if (mark.step !== null) return mark.step;
  let step = null;
  for (const row of whole) if (row[R.time] <= mark.time) step = stepOf(row[0]);
  return step;
}
function shownMarks() {
  const known = new Set([...S.marks.values()].filter((mark) => mark.kind === "members").map((mark) => mark.text));
  return [...S.marks.values()].filter((mark) => mark.kind !== "note" || !known.has(mark.text));
}

function xText(value) { return byTime ? duration(value) : fixed(value, 0); }
/** Return the marks of a chart over the run, as chart.js draws them. */
function chartMarks() {
  return shownMarks().filter((mark) => !QUIET.has(mark.kind)).map((mark) => ({ x: xOfMark(mark), colour: mark.kind, quiet: mark.kind === "checkpoint", text: `${MARKS[mark.kind]}: ${mark.text}` }))
    .filter((mark) => mark.x !== null);
}
function stepsText(first) { return S.stride === 1 ? `step ${fixed(first, 0)}` : `steps ${fixed(first, 0)}–${fixed(first + S.stride - 1, 0)}`; }
function title(x) { return byTime ? `after ${duration(x)}` : stepsText(Math.round(x - (S.stride - 1) / 2)); }
const overRun = { xText, title };
function chartOf(canvas, legend = null) { return new Chart(canvas, { legend, choose: (x) => !byTime && choose(Math.round(x)) }); }

/** One strip a rank: its step time, stacked; a straggler has no wait where the others do. */
function drawStrips() {
  const ranks = [...S.rows.keys()].sort((a, b) => a - b).slice(0, 32);
  const panels = ranks.map((rank) => {
    const rows = [];
    let before = null;
    for (const row of S.rows.get(rank)) {
      // A gap where the rank was away.
      if (before !== null && row[0] - before > 3) rows.push(null);
      before = row[0];
      rows.push([xOf(row), row[R.compute_s], row[R.exposed_s], row[R.wait_s]]);
    }
    return { name: `rank ${rank}`, rows };
  });
  const scaled = (high) => { $("strips-caption").textContent = `step time of each rank (a strip is ${seconds(high)} high)`; };
  const height = Math.max(1, ranks.length) * (ranks.length > 8 ? 36 : 56) + 38;
  strips.draw({ kind: "areas", series: PARTS, panels, height, most: 0.96, scaled, yText: seconds, marks: chartMarks(), label: `Step time of ${plural(ranks.length, "rank")} over the run`, ...overRun });
}

// The time line of single steps.

const view = { end: null, span: null, chosen: null, hits: [] };
function presentRanks() { return S.summary.ranks.filter((rank) => S.recent.get(rank.rank)?.size).map((rank) => rank.rank); }
/** Return what to add to the clock of each rank so that common steps end together: clocks of machines differ. */
function clockOffsets(ranks) {
  const lead = S.recent.get(ranks[0]);
  return new Map(ranks.map((rank) => {
    const apart = [];
    for (const [step, record] of S.recent.get(rank)) if (lead.has(step)) apart.push(lead.get(step)[F.time] - record[F.time]);
    apart.sort((a, b) => a - b);
    const middle = apart.length ? apart[apart.length >> 1] : 0;
    return [rank, Math.abs(middle) > 0.02 ? middle : 0];
  }));
}
function drawTimeline() {
  const ranks = presentRanks().slice(0, 32);
  const tall = 26;
  const canvas = $("timeline"), [g, width, height] = clearCanvas(canvas, Math.max(1, ranks.length) * tall + 42);
  view.hits = [];
  const soft = colour("soft");
  g.fillStyle = soft;
  if (!ranks.length) {
    g.fillText("no step yet", 8, 24);
    return;
  }
  const offsets = clockOffsets(ranks);
  const records = ranks.map((rank) => [...S.recent.get(rank).values()]);
  const newest = Math.max(...records.map((list, place) => list.at(-1)[F.time] + offsets.get(ranks[place])));
  const oldest = Math.min(...records.map((list, place) => list[0][F.time] + offsets.get(ranks[place]) - list[0][F.step_s]));
  const some = records.flatMap((list) => list.slice(-20)).map((record) => record[F.step_s]).sort((a, b) => a - b);
  const fit = some[some.length >> 1] * (width < 560 ? 5 : 12);
  const span = Math.min(view.span ?? fit, Math.max(newest - oldest, fit));
  const end = view.end === null ? newest : Math.min(Math.max(view.end, oldest + span / 2), newest + span / 2);
  Object.assign(view, { drawnSpan: span, drawnEnd: end, newest, oldest });
  const labels = ranks.map((rank) => `rank ${rank}`);
  const left = 10 + Math.max(...labels.map((text) => g.measureText(text).width));
  const [right, top] = [width - 8, 20];
  const px = (at) => left + ((at - (end - span)) / span) * (right - left);
  view.left = left;
  view.right = right;
  g.save();
  g.beginPath();
  g.rect(left, 0, right - left, height);
  g.clip();
  const paints = PHASES.map((phase) => [phase, colour(phase)]), paper = colour("paper");
  records.forEach((list, place) => {
    const [y, offset] = [top + place * tall, offsets.get(ranks[place])];
    for (const record of list) {
      const stop = record[F.time] + offset;
      let at = stop - record[F.step_s];
      if (stop < end - span || at > end) continue;
      const [x0, x1] = [px(at), px(stop)];
      for (const [phase, paint] of paints) {
        const part = record[F[`${phase}_s`]] ?? 0;
        if (part <= 0) continue;
        g.fillStyle = paint;
        g.fillRect(px(at), y + 2, Math.max(0.6, px(at + part) - px(at)), tall - 6);
        at += part;
      }
      if (at < stop - record[F.step_s] * 0.02) {
        g.fillStyle = colour("other");
        g.fillRect(px(at), y + 2, x1 - px(at), tall - 6);
      }
      g.fillStyle = paper;
      g.fillRect(x1 - 1, y + 2, 1, tall - 6);
      if (record[F.step] === view.chosen) {
        g.strokeStyle = colour("ink");
        g.lineWidth = 2;
        g.strokeRect(x0, y + 1, x1 - x0 - 1, tall - 4);
      }
      if (place === 0 && x1 - x0 > 8 + g.measureText(fixed(record[F.step], 0)).width) {
        g.fillStyle = soft;
        g.textAlign = "center";
        g.fillText(fixed(record[F.step], 0), (Math.max(x0, left) + Math.min(x1, right)) / 2, top - 6);
      }
      view.hits.push([x0, x1, y, record[F.step]]);
    }
  });
  for (const mark of shownMarks()) {
    const x = px(mark.time);
    if (x < left || x > right || QUIET.has(mark.kind)) continue;
    g.lineWidth = 2;
    g.setLineDash(mark.kind === "checkpoint" ? [3, 3] : []);
    line(g, colour(mark.kind), x, top - 4, x, top + ranks.length * tall);
    g.setLineDash([]);
  }
  g.restore();
  g.fillStyle = soft;
  g.textAlign = "right";
  labels.forEach((text, place) => g.fillText(text, left - 6, top + place * tall + tall / 2 + 3));
  g.textAlign = "center";
  const now = view.newest;
  for (const value of ticks(end - span - now, end - now, Math.min(6, width / 120))) {
    const text = value === 0 ? "newest" : `${value > 0 ? "+" : "−"}${lean(seconds(Math.abs(value)))}`;
    const x = px(now + value);
    if (x - 20 > left && x + g.measureText(text).width / 2 < width) g.fillText(text, x, height - 4);
  }
  canvas.setAttribute("aria-label", `The last steps of ${plural(ranks.length, "rank")}, from ${seconds(newest - end + span)} ago on`);
}
function zoom(factor, at = null) {
  const span = view.drawnSpan;
  const next = Math.max(0.002, Math.min(span * factor, (view.newest - view.oldest) * 1.05 || span));
  if (at !== null) {
    const place = (at - view.left) / (view.right - view.left);
    view.end = view.drawnEnd + (1 - place) * (next - span);
  }
  view.span = next;
  setFollow(view.end === null || view.end >= view.newest);
  draw(drawTimeline);
}
function setFollow(on) {
  if (on) view.end = null;
  else view.end ??= view.drawnEnd;
  $("follow").setAttribute("aria-pressed", String(on));
}
function choose(step) {
  view.chosen = step;
  showDetail();
  draw();
}
function showDetail() {
  const place = $("detail");
  place.replaceChildren();
  if (view.chosen === null || !S.summary) return;
  const single = [...S.recent].filter(([, kept]) => kept.has(view.chosen)).sort((a, b) => a[0] - b[0]);
  let title, heads, lines;
  if (single.length) {
    title = `Step ${fixed(view.chosen, 0)} in ms`;
    heads = ["rank", "step", ...PHASES.map((phase) => PHASE_NAMES[phase] ?? phase), "all-reduce", "of it hidden", "loss", "gradient norm"];
    lines = single.map(([rank, kept]) => {
      const record = kept.get(view.chosen);
      const ms = (name) => (record[F[name]] === null ? NONE : number(record[F[name]] * 1e3));
      return [`rank ${rank}`, ms("step_s"), ...PHASES.map((phase) => ms(`${phase}_s`)), ms("allreduce_s"), ms("hidden_s"), loss(record[F.loss]), number(record[F.grad_norm])];
    });
  } else {
    const bucket = Math.floor(view.chosen / S.stride);
    const rows = [...S.rows].map(([rank, list]) => [rank, list.find((row) => row[0] === bucket)]).filter(([, row]) => row);
    if (!rows.length) return;
    title = `${stepsText(bucket * S.stride)} in ms${S.stride > 1 ? ", on average" : ""}`;
    heads = ["rank", "step", "compute", "communication", "wait", "loss"];
    const ms = (value) => number(value * 1e3);
    lines = rows.sort((a, b) => a[0] - b[0]).map(([rank, row]) => [`rank ${rank}`, ms(row[R.step_s]), ms(row[R.compute_s]), ms(row[R.exposed_s]), ms(row[R.wait_s]), loss(row[R.loss])]);
  }
  const table = el("table", {}, el("caption", {}, title), el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, ...lines.map(([name, ...cells]) => el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((text) => el("td", {}, text))))));
  place.append(el("div", { class: "scroll", tabindex: "0" }, table));
}
function stepUnder(event) {
  const hit = view.hits.find(([x0, x1, y]) => event.offsetX >= x0 && event.offsetX < x1 && event.offsetY >= y && event.offsetY < y + 26);
  return hit ? hit[3] : null;
}
function watchTimeline() {
  const canvas = $("timeline");
  let drag = null;
  canvas.addEventListener("wheel", (event) => {
    if (!view.hits.length) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.offsetX, end: view.drawnEnd, moved: false }; });
  canvas.addEventListener("pointermove", (event) => {
    if (drag && event.buttons) {
      const moved = event.offsetX - drag.x;
      drag.moved ||= Math.abs(moved) > 4;
      if (!drag.moved) return;
      view.end = drag.end - (moved / (view.right - view.left)) * view.drawnSpan;
      setFollow(view.end >= view.newest);
      draw(drawTimeline);
      return;
    }
    canvas.style.cursor = stepUnder(event) === null ? "grab" : "pointer";
  });
  canvas.addEventListener("pointerup", (event) => {
    const step = stepUnder(event);
    if (drag && !drag.moved && step !== null) choose(step);
    drag = null;
  });
  canvas.addEventListener("keydown", (event) => {
    const kept = S.recent.get(presentRanks()[0]);
    if (!kept) return;
    const steps = [...kept.keys()];
    if (event.key === "+" || event.key === "=") zoom(0.7);
    else if (event.key === "-") zoom(1.4);
    else if (event.key === "End") setFollow(true), choose(steps.at(-1));
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const at = steps.indexOf(view.chosen);
      const step = steps[at < 0 ? steps.length - 1 : Math.max(0, Math.min(steps.length - 1, at + (event.key === "ArrowLeft" ? -1 : 1)))];
      const ends = kept.get(step)[F.time];
      if (ends < view.drawnEnd - view.drawnSpan + kept.get(step)[F.step_s] || ends > view.drawnEnd) {
        view.end = ends + view.drawnSpan / 2;
        setFollow(view.end >= view.newest);
      }
      choose(step);
    } else return;
    event.preventDefault();
  });
  $("zoom-in").addEventListener("click", () => zoom(0.6));
  $("zoom-out").addEventListener("click", () => zoom(1.6));
  $("follow").addEventListener("click", () => { setFollow(view.end !== null); draw(); });
}

// The rest of the page.

function drawHead() {
  const s = S.summary;
  $("status").textContent = s.status === "lost" ? "not supervised" : s.status;
  $("status").className = `pill ${s.status}`;
  const facts = [s.what, s.on && `on ${s.on}`, s.params && `${si(s.params, "").replace(" ", "")} parameters`, s.sync && `${s.sync} (${s.wire})`, s.copies !== null && (s.copies ? "parts on two ranks each" : "parts without copies"), s.device];
  $("about").textContent = facts.filter(Boolean).join(" · ");
  const total = s.steps ?? s.step;
  const bar = $("progress");
  bar.setAttribute("aria-valuenow", s.step);
  bar.setAttribute("aria-valuemax", total);
  bar.firstElementChild.style.width = `${total ? (100 * s.step) / total : 0}%`;
  while (bar.children.length > 1) bar.lastElementChild.remove();
  for (const mark of shownMarks()) {
    if (mark.step === null || !total || QUIET.has(mark.kind) || mark.kind === "checkpoint") continue;
    const tick = el("b", { title: mark.text });
    tick.style.left = `${(100 * mark.step) / total}%`;
    tick.style.background = `var(--${mark.kind})`;
    bar.append(tick);
  }
  const isWaiting = !s.step && !OVER.includes(s.status);
  const texts = [isWaiting ? `waiting for the first step${s.steps ? ` of ${fixed(s.steps, 0)}` : ""}` : s.steps ? `step ${fixed(s.step, 0)} of ${fixed(s.steps, 0)} (${fixed((100 * s.step) / s.steps, s.steps > 999 ? 1 : 0)}%)` : `step ${fixed(s.step, 0)}`];
  if (s.left_s !== null) texts.push(`${duration(s.left_s)} left`);
  const isOver = OVER.includes(s.status);
  if (s.first_time !== null) texts.push(`${duration(s.last_time - s.first_time)} ${isOver ? "in all" : "so far"}`);
  const silent = s.now - (s.last_time ?? s.now);
  if (["running", "starting", "regrouping"].includes(s.status) && silent > 20) texts.push(`last event ${duration(silent)} ago`);
  if (s.status_text) texts.push(s.status_text);
  $("progress-text").textContent = texts.join(" · ");
  document.title = `${s.steps ? `${Math.floor((100 * s.step) / s.steps)}% ` : ""}${s.name} · ${s.status}`;
  if (s.loaded < 1) {
    $("banner").textContent = `Reading a long run: ${fixed(100 * s.loaded, 0)}% …`;
    $("banner").hidden = false;
  }
  $("command").textContent = s.command;
  const skipped = [];
  if (s.unreadable) skipped.push(`${plural(s.unreadable, "line")} of the run folder could not be read and ${s.unreadable === 1 ? "was" : "were"} skipped.`);
  if (s.unfinished) skipped.push(`${plural(s.unfinished, "file")} ${s.unfinished === 1 ? "ends" : "end"} in a half-written line.`);
  $("skipped").textContent = skipped.join(" ");
  $("skipped").hidden = !skipped.length;
}
function drawFigures() {
  const s = S.summary;
  const present = s.ranks.filter((rank) => rank.is_present);
  const timed = present.filter((rank) => rank.exposed_s !== null);
  const share = timed.length ? timed.reduce((sum, rank) => sum + (rank.step_s ? (rank.exposed_s + rank.wait_s) / rank.step_s : 0), 0) / timed.length : null;
  const against = s.speedup ? `${s.speedup.is_estimate ? "about " : ""}${fixed(s.speedup.ratio, 2)}× ${s.speedup.than}${s.speedup.is_estimate ? " (estimate)" : ""}` : "";
  const off = s.predicted && s.step_s ? (s.step_s / s.predicted.step_s - 1) * 100 : null;
  const predicted = s.predicted ? `predicted ${seconds(s.predicted.step_s)}${off === null ? "" : ` (${off >= 0 ? "+" : "−"}${fixed(Math.abs(off), 0)}%)`}` : "mean of the last steps";
  const nodes = s.nodes.filter((node) => node.is_present).length;
  const boxes = [
    ["loss", loss(s.loss), s.val_loss === null ? "" : `validation ${loss(s.val_loss)}`],
    [`${s.unit} per second`, s.speed === null ? NONE : number(s.speed), against],
    ["step", s.step_s ? seconds(s.step_s) : NONE, predicted],
    ["communication and wait", share === null || !s.step_s ? NONE : `${fixed(100 * share, share < 0.1 ? 1 : 0)}%`, "of a step"],
    ["ranks", String(present.length), `on ${plural(nodes, "node")}${present.length < s.ranks.length ? `; ${s.ranks.length - present.length} away` : ""}`],
    ["changes of members", String(shownMarks().filter((mark) => mark.kind === "members").length), s.generation === "0-0" ? "its ranks are fixed" : "ranks that left or joined"],
  ];
  $("figures").replaceChildren(...boxes.map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, note)))));
}
// What is sampled of a node while it trains, as parts of the time; shown where it is not zero.
const SAMPLED = {
  cpu: "CPU in use", memory: "memory in use", clock: "clock, of its highest", throttled: "CPU quota used up", frozen: "stood still", memory_stall: "waits for memory",
  io_stall: "waits for a disk", steal: "CPU given to others", resent: "packets sent again",
};
function sampleRows(node) {
  const s = node.sample, rows = [];
  for (const [name, label] of Object.entries(SAMPLED)) {
    if (!(s[name] > 0)) continue;
    const text = `${fixed(100 * s[name], s[name] < 0.1 ? 1 : 0)}%`;
    rows.push(el("span", {}, label), el("span", { class: "value" }, text), el("meter", { min: 0, max: 1, value: Math.min(1, s[name]), "aria-label": label }));
  }
  if (s.other_cores > 0.05) rows.push(el("span", {}, "other programs"), el("span", { class: "value" }, `${number(s.other_cores, 2)} cores`));
  if (s.on_battery > 0) rows.push(el("span", {}, "on battery"), el("span"));
  return rows;
}
function drawNodes() {
  const nodes = S.summary.nodes;
  const list = $("nodes");
  list.className = nodes.length === 1 ? "alone" : "";
  list.replaceChildren(...nodes.map((node) => {
    const link = [];
    if (node.link_mbps) link.push(`${si(node.link_mbps * 1e6, "bit/s")} link`);
    if (node.is_present && node.sent_bps !== null && node.sent_bps > 1e3) link.push(`sends ${si(node.sent_bps, "bit/s")}${node.link_mbps ? ` (${fixed(node.sent_bps / node.link_mbps / 1e4, 0)}%)` : ""}`);
    const state = node.is_present ? "present" : "away";
    const where = [node.address, node.interface].filter(Boolean).join(" · ");
    const machine = [node.cpu, node.cores && plural(node.cores, "core"), node.memory_bytes && si(node.memory_bytes, "B")].filter(Boolean).join(", ");
    const rows = node.is_present ? sampleRows(node) : [];
    const card = el("div", { class: "card" }, el("span", { class: "state" }, state), el("strong", {}, node.name),
      el("div", { class: "soft" }, where || "no address recorded"), machine ? el("div", { class: "soft" }, machine) : "",
      el("div", { class: "chips" }, ...node.ranks.map((rank) => el("span", {}, `rank ${rank}`)), node.generation === "0-0" ? "" : el("span", {}, `generation ${node.generation.split("-")[0]}`)),
      rows.length ? el("div", { class: "load" }, ...rows) : "");
    return el("li", { class: state, "data-node": node.name }, nodes.length > 1 ? el("div", { class: "link" }, link.join(", ") || "link") : "", card);
  }));
}
function drawRanks() {
  const ranks = S.summary.ranks;
  const longest = Math.max(...ranks.map((rank) => (rank.is_present ? rank.step_s : 0)), S.summary.predicted?.step_s ?? 0) || 1;
  const bars = (figures) => ["compute", "exposed", "wait"].map((part) => {
    const piece = el("b", { class: part, title: `${part === "exposed" ? "communication" : part} ${seconds(figures[`${part}_s`])}` });
    piece.style.width = `${(100 * figures[`${part}_s`]) / longest}%`;
    return piece;
  });
  const row = (name, figures, text, kind) => el("div", { role: "row", class: kind }, el("span", { role: "rowheader", class: kind }, name), el("span", { role: "cell", class: `bar ${kind}` }, ...bars(figures)), el("span", { role: "cell", class: kind }, text));
  const rows = ranks.map((rank) => {
    const kind = rank.is_present ? (rank.slow ? "slow" : "") : "absent";
    const text = rank.doing && !rank.step ? rank.doing : rank.is_present ? (rank.step_s ? seconds(rank.step_s) : NONE) : "away";
    // The last bars of a rank that is away are not what it does now.
    return row(`rank ${rank.rank} · ${rank.node}`, rank.is_present ? rank : { compute_s: 0, exposed_s: 0, wait_s: 0 }, text, kind);
  });
  const p = S.summary.predicted;
  if (p) rows.push(row("predicted", { compute_s: (p.compute_s ?? 0) + (p.optimizer_s ?? 0) + (p.other_s ?? 0), exposed_s: p.exposed_s ?? 0, wait_s: p.wait_s ?? 0 }, seconds(p.step_s), "absent"));
  $("ranks").replaceChildren(...rows);
  const slow = ranks.filter((rank) => rank.slow).sort((a, b) => b.slow - a.slow)[0];
  $("straggler").hidden = !slow;
  if (slow) $("straggler").textContent = `rank ${slow.rank} on ${slow.node} is the straggler: its own work takes ${fixed(slow.slow, 2)}× that of the median rank, and the others wait for it.`;
}
function drawCharts() {
  const common = { kind: "lines", marks: chartMarks(), ...overRun };
  const series = [{ name: "training", colour: "measured", points: whole.map((row) => [xOf(row), row[R.loss]]) }];
  if (S.valLoss.length) series.push({ name: "validation", colour: "validation", dots: true, points: S.valLoss.map(([bucket, value]) => [xOfStep(stepOf(bucket)), value]) });
  losses.draw({ ...common, series, yText: loss, label: "Loss" });
  const amounts = whole.map((row) => [xOf(row), row[R.amount] > 0 && row[R.step_s] > 0 ? row[R.amount] / row[R.step_s] : null]);
  const isKnown = amounts.some((point) => point[1] !== null), name = `${isKnown ? S.summary.unit : "steps"} per second`;
  $("speed-caption").textContent = name;
  const points = isKnown ? amounts : whole.map((row) => [xOf(row), 1 / row[R.step_s]]);
  speeds.draw({ ...common, series: [{ name, colour: "measured", points }], zero: true, label: "Speed" });
  drawStrips();
}
function drawValues() {
  $("values-section").hidden = !S.values.size;
  const place = $("values");
  for (const [name, rows] of [...S.values].sort((a, b) => a[0].localeCompare(b[0]))) {
    let figure = [...place.children].find((one) => one.dataset.name === name);
    if (!figure) {
      figure = el("figure", { "data-name": name }, el("figcaption"), el("canvas"));
      place.append(figure);
      chartOf(figure.lastElementChild);
    }
    figure.firstElementChild.replaceChildren(`${name} `, el("b", {}, lean(number(S.summary.values[name], 4))));
    const points = rows.map(([bucket, value]) => [xOfStep(stepOf(bucket)), value]);
    const series = [{ name, colour: "measured", points, dots: points.length < 30 }];
    figure.lastElementChild.chart.draw({ kind: "lines", series, label: name, ...overRun });
  }
}
let listed = "";
function drawEvents() {
  const marks = shownMarks().sort((a, b) => b.time - a.time || b.id - a.id).slice(0, MOST_LISTED);
  const digest = marks.map((mark) => `${mark.id} ${mark.text}`).join("\n");
  if (digest === listed) return;
  listed = digest;
  $("events").replaceChildren(...marks.map((mark) => el("li", { "data-kind": mark.kind }, dot(mark.kind), el("time", {}, clock(mark.time)),
    el("span", { class: "at" }, mark.step === null ? MARKS[mark.kind] : `step ${fixed(mark.step, 0)}`), el("span", { class: "text" }, mark.text))));
  const kinds = Object.keys(MARKS).filter((kind) => !QUIET.has(kind) && marks.some((mark) => mark.kind === kind));
  $("mark-legend").replaceChildren(...kinds.map((kind) => key(dot(kind), MARKS[kind])));
}

const due = new Set(); // what the next frame draws
function draw(part = drawPage) {
  const isScheduled = due.size > 0;
  due.add(part);
  if (isScheduled) return;
  requestAnimationFrame(() => {
    const parts = due.has(drawPage) ? [drawPage] : [...due];
    due.clear();
    if (S.summary) for (const drawPart of parts) drawPart();
  });
}
function drawPage() {
  whole = wholeRun();
  drawHead();
  drawFigures();
  drawNodes();
  drawRanks();
  drawEvents();
  drawCharts();
  drawTimeline();
  drawValues();
}
function setAxis(time) {
  byTime = time;
  $("by-time").setAttribute("aria-pressed", String(time));
  $("by-step").setAttribute("aria-pressed", String(!time));
  for (const { chart } of document.querySelectorAll("canvas")) if (chart) chart.cursor = chart.zoom = null;
  draw();
}
$("by-step").addEventListener("click", () => setAxis(false));
$("by-time").addEventListener("click", () => setAxis(true));
$("phase-legend").replaceChildren(...PHASES.map((phase) => key(dot(phase), PHASE_NAMES[phase] ?? phase)));
const losses = chartOf($("loss"), $("loss-keys")), speeds = chartOf($("speed")), strips = chartOf($("strips"));
watchTimeline();
addEventListener("resize", () => draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
connect();
