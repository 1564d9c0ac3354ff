"use strict";

// Charts of the report and of the live page, drawn on canvases: lines, stacked areas, bars. All show values under the pointer
// and by the arrow keys, zoom where the pointer is dragged (a double click or Escape shows all again), and have a legend
// whose entries hide a series. Colours are CSS variables, by their names in palette.py.

const NONE = "–";
const LABEL_SHARE = 0.38; // of the width, at most, for the names of bars

function fixed(value, digits) { return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }); }
function number(value, digits = 3) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-4) return value.toExponential(digits - 1);
  return fixed(value, Math.max(0, Math.min(8, digits - 1 - Math.floor(Math.log10(size)))));
}
/** Drop zeros that say nothing, for ticks and values that seldom change. */
function lean(text) { return text.includes(".") ? text.replace(/\.?0+(?=$| )/, "") : text; }
function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

/** Make an element: text is always text, never markup. */
function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) name === "class" ? (made.className = value) : made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}
function dot(name) { const made = el("i"); made.style.background = `var(--${name})`; return made; }

function clearCanvas(canvas, height, scale = devicePixelRatio || 1) {
  if (height) canvas.style.height = `${height}px`;
  const box = canvas.getBoundingClientRect();
  const [wide, tall] = [Math.round(box.width * scale), Math.round(box.height * scale)];
  if (canvas.width !== wide || canvas.height !== tall) [canvas.width, canvas.height] = [wide, tall];
  const g = canvas.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, box.width, box.height);
  g.font = "12px system-ui, sans-serif";
  g.lineJoin = "round";
  return [g, box.width, box.height];
}
function ticks(low, high, most) {
  const raw = (high - low) / Math.max(1, most);
  const unit = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((factor) => factor * unit).find((value) => value >= raw * (1 - 1e-9));
  const places = [];
  for (let at = Math.ceil(low / size) * size; at <= high + size * 1e-9; at += size) places.push(Math.abs(at) < size * 1e-9 ? 0 : at);
  return places;
}
function line(g, paint, x0, y0, x1, y1) {
  g.strokeStyle = paint;
  g.beginPath();
  g.moveTo(x0, y0);
  g.lineTo(x1, y1);
  g.stroke();
}
/** Return the lowest and the highest number, without `Math.min(...)`, whose arguments are limited. */
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/**
 * A figure has `kind`, `series` with names and colours, names of the axes `x` and `y`, and:
 *   lines: `points` of each series, [x, y] or [x, mean, lowest, highest]; y is null where it is not known
 *   areas: `panels` below each other with `rows` [x, a value of each series, highest sum]; null is a gap
 *   bars:  `names` of the bars; each series has `values`, which are stacked, or `spans` [bar, from, to, text]
 * Its `marks` are vertical lines. Functions may replace `xText` and `yText` (of ticks and values), and `title` (of the tip).
 */
class Chart {
  /** `choose` gets the x of a place that is clicked. */
  constructor(canvas, { legend = null, choose = null } = {}) {
    Object.assign(this, { canvas, choose, legend, figure: null, zoom: null, cursor: null, picture: null, frame: null, placed: [] });
    this.hidden = new Set();
    this.drag = null;
    canvas.chart = this;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    for (const name of ["pointerdown", "pointermove", "pointerup", "dblclick", "keydown"]) canvas.addEventListener(name, (event) => this.frame && this[name](event));
    for (const name of ["pointerleave", "pointercancel", "blur"]) canvas.addEventListener(name, () => this.leave());
  }

  draw(figure = this.figure, scale = undefined) {
    this.figure = figure;
    this.picture = this.frame = null;
    this.placed = [];
    this.drawLegend();
    const [g, width, height] = clearCanvas(this.canvas, figure.height, scale);
    this.series = figure.series.filter((one) => !this.hidden.has(one.name));
    if (!KINDS[figure.kind].draw(this, g, width, height)) {
      g.fillStyle = colour("soft");
      g.fillText(figure.series.length && !this.series.length ? "every series is hidden" : "nothing recorded yet", 8, 24);
    }
    if (this.cursor !== null) this.moveCursor();
  }
  drawLegend() {
    const { series, legend } = this.figure;
    const entries = (legend ?? series.length > 1) ? series : [];
    const digest = entries.map((one) => `${one.colour} ${one.name} ${this.hidden.has(one.name)}`).join("\n") + this.zoom;
    if (this.listed === digest) return;
    this.listed = digest;
    if (!this.legend) this.canvas.before((this.legend = el("p", { class: "legend" })));
    const buttons = entries.map((one) => {
      const button = el("button", { type: "button", "aria-pressed": !this.hidden.has(one.name) }, dot(one.colour), one.name);
      if (one.dash?.length || one.hatched) button.firstChild.classList.add("dashed");
      button.addEventListener("click", () => {
        this.hidden.delete(one.name) || this.hidden.add(one.name);
        this.draw();
      });
      return button;
    });
    if (this.zoom) {
      buttons.push(el("button", { type: "button", class: "all" }, "show all"));
      buttons.at(-1).addEventListener("click", () => this.zoomTo(null));
    }
    this.legend.replaceChildren(...buttons);
  }

  /** Place the axes, and draw the ticks of x and the marks. The room on the left is that of the widest label. */
  setFrame(g, range, labels, { width, top, bottom }) {
    let [first, last] = this.zoom ?? range;
    if (first === last) last = first + 1;
    const left = 10 + Math.max(0, ...labels.map((text) => g.measureText(text).width)), right = width - 12;
    const px = (x) => left + ((x - first) / (last - first)) * (right - left);
    this.frame = { left, right, top, bottom, first, last, range, px };
    const { x: name = "", xText = (value) => lean(number(value, 7)), xTicks, marks = [] } = this.figure;
    g.fillStyle = colour("soft");
    g.textAlign = "center";
    g.textBaseline = "alphabetic";
    const most = Math.min(8, (right - left) / 80), whole = name === "step";
    for (const value of xTicks ?? ticks(first, last, most)) {
      const half = g.measureText(xText(value)).width / 2;
      if ((whole && value % 1) || px(value) < left - 1 || px(value) > right + 1) continue;
      if (px(value) - half >= left - 12 && px(value) + half <= width) g.fillText(xText(value), px(value), bottom + 15);
    }
    if (name) g.fillText(name, (left + right) / 2, bottom + 31);
    this.placed = marks.map((mark) => [px(mark.x), mark]).filter(([x]) => x >= left - 1 && x <= right + 1);
    return this.frame;
  }
  drawMarks(g) {
    const { top, bottom } = this.frame;
    for (const [x, mark] of this.placed) {
      g.globalAlpha = mark.quiet ? 0.5 : 0.9;
      g.lineWidth = mark.quiet ? 1 : 1.6;
      g.setLineDash(mark.quiet ? [2, 4] : []);
      line(g, (g.fillStyle = colour(mark.colour)), x, top, x, bottom);
      g.setLineDash([]);
      g.globalAlpha = 1;
      g.beginPath();
      g.moveTo(x, top);
      g.lineTo(x - 4, top - 7);
      g.lineTo(x + 4, top - 7);
      g.fill();
    }
  }
  /** Draw the grid of one y axis; return its scale and its clip to the frame, to be ended by `g.restore()`. */
  drawGrid(g, low, high, values, top, bottom) {
    const { left, right } = this.frame, py = (y) => bottom - ((y - low) / (high - low)) * (bottom - top);
    g.lineWidth = 1;
    g.textAlign = "right";
    g.textBaseline = "middle";
    for (const value of values) {
      line(g, colour("rule"), left, py(value), right, py(value));
      g.fillStyle = colour("soft");
      g.fillText(lean(this.yText(value)), left - 5, py(value));
    }
    if (this.figure.y) {
      g.textAlign = "left";
      g.fillText(this.figure.y, 0, 8);
    }
    this.clip(g, top, bottom);
    return py;
  }
  clip(g, top, bottom) {
    const { left, right } = this.frame;
    g.save();
    g.beginPath();
    g.rect(left - 3, top - 3, right - left + 6, bottom - top + 6);
    g.clip();
  }
  yText(value) { return (this.figure.yText ?? number)(value); }
  isShown(x) { return x >= this.frame.first && x <= this.frame.last; }

  // The pointer and the keys.

  at(px) { return this.frame.first + ((px - this.frame.left) / (this.frame.right - this.frame.left)) * (this.frame.last - this.frame.first); }
  pointerdown(event) {
    if (event.button) return;
    this.drag = { from: event.offsetX, to: event.offsetX };
    if (event.isTrusted) this.canvas.setPointerCapture(event.pointerId);
  }
  pointermove(event) {
    if (this.drag) this.drag.to = event.offsetX;
    this.show(event.offsetX, event.offsetY);
  }
  pointerup() {
    const { from, to } = this.drag ?? {};
    this.drag = null;
    if (Math.abs(to - from) > 6) this.zoomTo([this.at(Math.min(from, to)), this.at(Math.max(from, to))]);
    else if (this.choose && this.cursor !== null) this.choose(this.cursor);
  }
  dblclick() { this.zoomTo(null); }
  leave() {
    this.cursor = this.drag = null;
    tip.hidden = true;
    if (this.picture) this.moveCursor();
  }
  keydown(event) {
    const places = KINDS[this.figure.kind].places(this), { range, px, top } = this.frame;
    const step = places.findIndex((x) => x === this.cursor), next = { Home: 0, End: places.length - 1, ArrowLeft: step - 1, ArrowRight: step + 1 }[event.key];
    if (event.key === "Enter" && this.choose && this.cursor !== null) this.choose(this.cursor);
    else if (event.key === "Escape") this.zoomTo(null);
    else if (event.key === "+" || event.key === "-") {
      const middle = this.cursor ?? (this.frame.first + this.frame.last) / 2, half = (this.frame.last - this.frame.first) * (event.key === "+" ? 0.25 : 1);
      this.zoomTo(2 * half >= range[1] - range[0] ? null : [middle - half, middle + half]);
    } else if (next !== undefined && places.length) {
      const x = places[step < 0 ? (event.key === "Home" ? 0 : places.length - 1) : Math.max(0, Math.min(places.length - 1, next))];
      this.show(...(KINDS[this.figure.kind].pixels?.(this, x) ?? [px(x), top]));
    } else return;
    event.preventDefault();
  }
  zoomTo(range) {
    const [low, high] = this.frame.range;
    this.zoom = range && [Math.max(low, range[0]), Math.min(high, range[1])];
    if (this.zoom && !(this.zoom[1] > this.zoom[0])) this.zoom = null;
    this.draw();
  }
  /** Show the values of a place beside it, and move the cursor there. */
  show(x, y) {
    const lines = KINDS[this.figure.kind].tell(this, x, y);
    for (const [at, mark] of this.placed) if (Math.abs(at - x) < 7) lines.push(mark.text);
    this.moveCursor();
    tip.hidden = !lines.length;
    tip.textContent = lines.join("\n");
    const box = this.canvas.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(box.left + x + 14, innerWidth - tip.offsetWidth - 6))}px`;
    tip.style.top = `${Math.max(4, Math.min(box.top + y + 14, innerHeight - tip.offsetHeight - 6))}px`;
  }
  /** Draw the cursor over the chart, which is kept as a picture: drawing 8 × 1,000 rows again takes too long. */
  moveCursor() {
    const { canvas, frame, drag } = this, g = canvas.getContext("2d");
    if (!frame) return;
    if (!this.picture) {
      this.picture = el("canvas", { width: canvas.width, height: canvas.height });
      this.picture.getContext("2d").drawImage(canvas, 0, 0);
    }
    g.save();
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, canvas.width, canvas.height);
    g.drawImage(this.picture, 0, 0);
    g.restore();
    if (drag) {
      g.fillStyle = colour("accent");
      g.globalAlpha = 0.2;
      g.fillRect(drag.from, frame.top, drag.to - drag.from, frame.bottom - frame.top);
      g.globalAlpha = 1;
    }
    g.lineWidth = 1;
    if (this.cursor !== null && this.isShown(this.cursor) && this.figure.kind !== "bars") line(g, colour("soft"), frame.px(this.cursor), frame.top, frame.px(this.cursor), frame.bottom);
  }
  title(x, next = null) {
    if (this.figure.title) return this.figure.title(x);
    const name = this.figure.x || "step";
    return next !== null && next - x > 1 ? `${name}s ${fixed(x, 0)}–${fixed(next - 1, 0)}, on average` : `${name} ${lean(number(x, 7))}`;
  }
}

function nearest(points, x) {
  let best = null;
  for (const point of points) if (point && point[1] !== null && (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x))) best = point;
  return best;
}

const LINES = {
  draw(chart, g, width, height) {
    const { figure, series } = chart, small = height < 150;
    const known = series.map((one) => one.points.filter((point) => point[1] !== null)), all = known.flat();
    if (!all.length) return false;
    const range = extent(all.map((point) => point[0]));
    const [first, last] = chart.zoom ?? range;
    const shown = all.filter(([x]) => x >= first && x <= last), seen = shown.length ? shown : all;
    let [low, high] = extent(seen.flatMap(([, y, lowest = y, highest = y]) => [lowest, highest]));
    if (figure.zero) low = Math.min(0, low);
    if (high === low) [low, high] = [low - (low ? Math.abs(low) * 0.05 : figure.zero ? 0 : 0.5), high + (Math.abs(high) * 0.05 || 0.5)];
    const pad = (high - low) * 0.06;
    [low, high] = [figure.zero && low === 0 ? 0 : low - pad, high + pad];
    const values = ticks(low, high, small ? 3 : 5), bottom = height - (figure.x ? 38 : 20);
    const frame = chart.setFrame(g, range, values.map((value) => lean(chart.yText(value))), { width, top: figure.y ? 20 : figure.marks ? 14 : 6, bottom });
    const { px, top } = frame, py = chart.drawGrid(g, low, high, values, top, bottom);
    for (const [place, one] of series.entries()) {
      const paint = (g.strokeStyle = g.fillStyle = colour(one.colour));
      const band = known[place].filter((point) => point.length > 2);
      g.globalAlpha = 0.25;
      g.beginPath();
      for (const [x, , lowest] of band) g.lineTo(px(x), py(lowest));
      for (const [x, , , highest] of band.toReversed()) g.lineTo(px(x), py(highest));
      g.fill();
      g.globalAlpha = 1;
      g.lineWidth = 1.7;
      g.strokeStyle = paint;
      g.setLineDash(one.dash ?? []);
      g.beginPath();
      let down = false;
      for (const [x, y] of one.points) {
        if (y !== null) down ? g.lineTo(px(x), py(y)) : g.moveTo(px(x), py(y));
        down = y !== null;
      }
      g.stroke();
      g.setLineDash([]);
      if (one.dots || known[place].length === 1) for (const [x, y] of known[place]) if (chart.isShown(x)) g.fillRect(px(x) - 2.5, py(y) - 2.5, 5, 5);
    }
    g.restore();
    chart.drawMarks(g);
    const now = known[0].at(-1), ends = extent(known[0].map((point) => point[1]));
    if (now) chart.canvas.setAttribute("aria-label", `${figure.label ?? figure.y}: now ${chart.yText(now[1])}, lowest ${chart.yText(ends[0])}, highest ${chart.yText(ends[1])}`);
    return true;
  },
  places(chart) { return [...new Set(chart.series.flatMap((one) => one.points.filter(([x, y]) => y !== null && chart.isShown(x)).map(([x]) => x)))].sort((a, b) => a - b); },
  tell(chart, px) {
    const near = chart.series.map((one) => nearest(one.points, chart.at(px))), main = nearest(near, chart.at(px));
    if (!main) return [];
    chart.cursor = main[0];
    return [chart.title(main[0]), ...chart.series.flatMap((one, place) => {
      const point = near[place];
      if (!point) return [];
      const where = Math.abs(point[0] - main[0]) > 1e-9 ? ` (${chart.title(point[0])})` : "";
      const band = point.length > 2 ? `, from ${chart.yText(point[2])} to ${chart.yText(point[3])}` : "";
      return [`${one.name}: ${chart.yText(point[1])}${band}${where}`];
    })];
  },
};

const AREAS = {
  draw(chart, g, width, height) {
    const { figure } = chart, { panels } = figure, all = panels.flatMap((panel) => panel.rows).filter(Boolean);
    if (!all.length || !chart.series.length) return false;
    const parts = figure.series.map((one, place) => [place + 1, one]).filter(([, one]) => !chart.hidden.has(one.name));
    const total = (row) => parts.reduce((sum, [column]) => sum + row[column], 0), peak = figure.series.length + 1;
    const showsPeak = parts.length === figure.series.length;
    const range = extent(all.map((row) => row[0])), [first, last] = chart.zoom ?? range;
    const shown = all.filter((row) => row[0] >= first && row[0] <= last);
    const sums = (shown.length ? shown : all).map((row) => Math.max(total(row), (showsPeak && row[peak]) || 0)).sort((a, b) => a - b);
    // Where a strip says so, one slow step, such as the first, does not flatten the rest.
    const high = 1.06 * sums[figure.most ? Math.floor(figure.most * (sums.length - 1)) : sums.length - 1] || 1;
    figure.scaled?.(high);
    const single = panels.length === 1 && height > 150, values = single ? ticks(0, high, 5) : [];
    const [top, bottom] = [figure.y ? 20 : 14, height - (figure.x ? 38 : 24)], tall = (bottom - top) / panels.length;
    chart.setFrame(g, range, single ? values.map((value) => lean(chart.yText(value))) : panels.map((panel) => panel.name), { width, top, bottom });
    const { px, left, right } = chart.frame, paints = parts.map(([, one]) => colour(one.colour));
    for (const [place, panel] of panels.entries()) {
      const base = top + (place + 1) * tall - (single ? 0 : 4), head = single ? top : base - tall + 8;
      const py = chart.drawGrid(g, 0, high, values, head, base);
      // A gap where the rank was away.
      const pieces = [[]];
      for (const row of panel.rows) row ? pieces.at(-1).push(row) : pieces.push([]);
      for (const rows of pieces.filter((piece) => piece.length)) {
        let under = rows.map(() => 0);
        for (const [part, [column]] of parts.entries()) {
          const over = rows.map((row, index) => under[index] + row[column]);
          g.fillStyle = paints[part];
          g.beginPath();
          rows.forEach((row, index) => g.lineTo(px(row[0]), py(over[index])));
          for (let index = rows.length - 1; index >= 0; index--) g.lineTo(px(rows[index][0]) - (rows.length === 1 ? 3 : 0), py(under[index]));
          g.fill();
          under = over;
        }
        if (showsPeak && rows[0].length > peak) {
          g.strokeStyle = colour("ink");
          g.globalAlpha = 0.55;
          g.lineWidth = 1;
          g.beginPath();
          for (const row of rows) g.lineTo(px(row[0]), py(row[peak]));
          g.stroke();
          g.globalAlpha = 1;
        }
      }
      g.restore();
      line(g, colour("rule"), left, base, right, base);
      if (single) continue;
      g.textAlign = "right";
      g.fillStyle = colour("soft");
      g.fillText(panel.name, left - 6, (head + base) / 2);
    }
    chart.drawMarks(g);
    chart.canvas.setAttribute("aria-label", `${figure.label ?? figure.y}; the highest shown is ${chart.yText(high)}`);
    return true;
  },
  places(chart) { return [...new Set(chart.figure.panels.flatMap((panel) => panel.rows).filter((row) => row && chart.isShown(row[0])).map((row) => row[0]))].sort((a, b) => a - b); },
  tell(chart, px) {
    const { panels, series, thinned } = chart.figure, near = panels.map((panel) => nearest(panel.rows, chart.at(px))), main = nearest(near, chart.at(px));
    if (!main) return [];
    chart.cursor = main[0];
    const total = (row) => chart.yText(series.reduce((sum, one, place) => sum + row[place + 1], 0));
    const rows = panels[0].rows, next = thinned ? rows[rows.indexOf(main) + 1]?.[0] ?? null : null;
    if (panels.length > 1) return [chart.title(main[0]), ...panels.flatMap((panel, place) => (near[place] ? [`${panel.name}: ${total(near[place])}`] : []))];
    const lines = chart.series.map((one) => `${one.name}: ${chart.yText(main[1 + series.indexOf(one)])}`);
    if (main.length > series.length + 1) lines.push(`longest step: ${chart.yText(main[series.length + 1])}`);
    return [chart.title(main[0], next), ...lines.reverse(), `all: ${total(main)}`];
  },
};

const BARS = {
  draw(chart, g, width, height) {
    const { figure, series } = chart, { names } = figure;
    const ends = names.map(() => 0);
    chart.spans = series.map((one) => one.spans ?? one.values.map((value, row) => [row, ends[row], (ends[row] += value)]));
    if (!chart.spans.flat().length) return false;
    const range = [0, Math.max(figure.last ?? 0, ...chart.spans.flat().map((span) => span[2]))];
    const short = (name) => {
      let text = name;
      while (g.measureText(text).width > LABEL_SHARE * width && text.length > 4) text = `${text.slice(0, text.length / 2 - 1)}…${text.slice(-text.length / 2 + 2)}`;
      return text;
    };
    const labels = names.map(short), [top, bottom] = [8, height - (figure.x ? 38 : 20)], tall = (bottom - top) / names.length;
    const { px, left, right } = chart.setFrame(g, range, labels, { width, top, bottom });
    chart.rowAt = (y) => Math.floor((y - top) / tall);
    chart.yOf = (row) => top + (row + 0.5) * tall;
    g.textBaseline = "middle";
    g.textAlign = "right";
    labels.forEach((text, row) => g.fillText(text, left - 6, chart.yOf(row)));
    chart.clip(g, top, bottom);
    for (const [place, one] of series.entries()) {
      for (const [row, from, to, text] of chart.spans[place]) {
        const box = [px(from), top + (row + 0.2) * tall, px(to) - px(from), 0.6 * tall];
        g.fillStyle = one.hatched ? hatching(g, colour(one.colour)) : colour(one.colour);
        g.fillRect(...box);
        if (one.hatched || text) {
          g.strokeStyle = colour(one.hatched ? one.colour : "paper");
          g.lineWidth = 1;
          g.strokeRect(...box);
        }
        const label = text ? "" : lean(number(to - from));
        if (!label || g.measureText(label).width > box[2] - 8) continue;
        g.textAlign = "center";
        g.fillStyle = "white";
        g.fillText(label, (px(from) + px(to)) / 2, chart.yOf(row));
      }
    }
    g.restore();
    line(g, colour("rule"), left, bottom, right, bottom);
    chart.drawMarks(g);
    chart.canvas.setAttribute("aria-label", `${figure.x} of ${names.join(", ")}`);
    return true;
  },
  // The arrow keys go through the bars.
  places(chart) { return chart.figure.names.map((_, row) => row); },
  pixels(chart, row) { return [chart.frame.left + 4, chart.yOf(row)]; },
  tell(chart, px, py) {
    const { figure } = chart, row = chart.rowAt(py), x = chart.at(px);
    chart.cursor = figure.names[row] === undefined ? null : row;
    if (chart.cursor === null) return [];
    const lines = [];
    for (const [place, one] of chart.series.entries())
      for (const [bar, from, to, text] of chart.spans[place])
        if (bar === row && (text ? x >= from && x <= to : to > from)) lines.push(text ? `${one.name}: ${text}` : `${one.name}: ${lean(number(to - from, 4))}`);
    return [figure.names[row], ...lines];
  },
};
function hatching(g, paint) {
  const tile = el("canvas", { width: 6, height: 6 }), lines = tile.getContext("2d");
  lines.lineWidth = 1.5;
  for (const shift of [-6, 0, 6]) line(lines, paint, shift, 6, shift + 6, 0);
  return g.createPattern(tile, "repeat");
}
const KINDS = { lines: LINES, areas: AREAS, bars: BARS };

const tip = el("div", { id: "tip", role: "status", hidden: "" });
document.body.append(tip);
