"use strict";
// Draws figures (panels over one horizontal axis) as SVG, with a cursor for pointer, touch and arrow keys.
// Text is only ever inserted as text nodes, never as markup.

const SVG_NS = "http://www.w3.org/2000/svg";
const NARROW = 560;
let hideOpen = null;  // closes the open tooltip
const cursors = new Map();  // figure id → cursor position, kept across live refreshes

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null) node.setAttribute(name, value);
  node.append(...children.filter((child) => child != null));
  return node;
}

function shape(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG_NS, tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null) node.setAttribute(name, value);
  node.append(...children.filter((child) => child != null));
  return node;
}

// Number formats -----------------------------------------------------------------------------------------------

function trim(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

function count(value, digits = 3) {
  for (const [unit, scale] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]])
    if (Math.abs(value) >= scale) return trim(value / scale, digits) + unit;
  return trim(value, digits);
}

function clock(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60]];
  for (const [unit, scale] of units) if (seconds >= scale) return `${trim(seconds / scale, 3)} ${unit}`;
  return `${trim(seconds, 3)} s`;
}

function scientific(value) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  if (size >= -2 && size < 4) return trim(value, 3);
  return `${trim(value / 10 ** size, 3)}e${size}`;
}

function format(value, unit, digits = 4) {
  if (unit === "count") return count(value, digits);
  if (unit === "percent") return `${trim(value, digits)} %`;
  if (unit === "seconds") return clock(value);
  if (unit === "scientific") return scientific(value);
  return Math.abs(value) >= 1e5 ? count(value, digits) : trim(value, digits);
}

// Axes ---------------------------------------------------------------------------------------------------------

function niceStep(span, most) {
  const raw = span / Math.max(most, 1);
  const base = 10 ** Math.floor(Math.log10(raw));
  return base * [1, 2, 2.5, 5, 10].find((factor) => factor * base >= raw * 0.85);
}

function timeStep(span, most) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  return span / most < 1 || span / most > 86400 ? niceStep(span, most) : steps.find((step) => step >= span / most);
}

function linearTicks(low, high, most, unit) {
  let step = unit === "seconds" ? timeStep(high - low, most) : niceStep(high - low, most);
  if (unit === "count" && high - low >= 1) step = step < 1 ? 1 : step === 2.5 ? 5 : step;  // whole numbers
  const ticks = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-6; place++) ticks.push(place * step);
  return ticks;
}

function logTicks(low, high, most) {
  const decades = Math.log10(high / low);
  if (decades < 0.9) return linearTicks(low, high, most, "number").filter((tick) => tick > 0);
  for (const factors of [[1, 2, 5], [1, 3], [1]]) {
    const ticks = decadeTicks(low, high, factors);
    if (ticks.length <= most + 1) return ticks;
  }
  const ticks = decadeTicks(low, high, [1]);
  return ticks.filter((_, place) => place % Math.ceil(ticks.length / most) === 0);
}

function decadeTicks(low, high, factors) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const factor of factors) ticks.push(Number(`${factor}e${power}`));
  return ticks.filter((tick) => tick >= low && tick <= high);
}

function rangeOf(panel) {
  let low = Infinity, high = -Infinity;
  for (const series of panel.series) for (const value of series.y) {
    if (panel.log && value <= 0) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return panel.log ? [0.1, 1] : [0, 1];
  if (panel.log) return low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.04, high * (high / low) ** 0.04];
  if (panel.top != null) high = panel.top;
  if (panel.zero) low = Math.min(low, 0);
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
  const room = (high - low) * 0.06;
  const roof = panel.unit === "percent" && high <= 100 ? Math.min(high + room, 100) : high + room;
  return [panel.zero && low === 0 ? 0 : low - room, roof];
}

function scaleOf([low, high], from, to, log) {
  const turn = log ? Math.log : (value) => value;
  const a = turn(low), b = turn(high);
  return (value) => from + (to - from) * (turn(value) - a) / (b - a);
}

// Lines --------------------------------------------------------------------------------------------------------

function pathOf(series, x, y) {
  const parts = [];
  for (let i = 0; i < series.x.length; i++) {
    const px = x(series.x[i]).toFixed(1), py = y(series.y[i]).toFixed(1);
    if (i === 0) parts.push(`M${px} ${py}`);
    else parts.push(series.style === "step" ? `H${px}V${py}` : `L${px} ${py}`);
  }
  return parts.join("");
}

function placeAt(series, value) {
  let low = 0, high = series.x.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (series.x[middle] <= value) low = middle; else high = middle - 1;
  }
  const next = low + 1;
  const nearer = next < series.x.length && series.x[next] - value < value - series.x[low];
  return nearer && series.style !== "step" ? next : low;
}

function shortName(series) {
  return series.name.split(" (")[0];
}

function spread(labels, top, bottom, gap) {
  labels.sort((a, b) => a.y - b.y);
  for (let i = 0; i < labels.length; i++)
    labels[i].y = Math.max(labels[i].y, i ? labels[i - 1].y + gap : top);
  for (let i = labels.length - 1; i >= 0; i--)
    labels[i].y = Math.min(labels[i].y, i < labels.length - 1 ? labels[i + 1].y - gap : bottom);
}

// One figure ---------------------------------------------------------------------------------------------------

// A panel's only line needs no name if the panel's label names it (as Panel.named).
function named(panel) {
  const shown = panel.series.filter((series) => series.style !== "faint");
  const alone = shown.length === 1 && panel.label.includes(shortName(shown[0]));
  return alone || !panel.legend ? [] : shown;
}

function legendOf(figure) {
  const shown = new Map(figure.panels.flatMap(named).map((series) => [shortName(series), series]));
  return el("ul", { class: "legend" }, ...[...shown].map(([name, series]) =>
    el("li", { class: `c-${series.color}${series.style === "target" ? " dotted" : ""}` }, name)));
}

function spoken(figure) {
  const parts = [];
  for (const panel of figure.panels) for (const series of panel.series) {
    if (series.style === "faint" && panel.series.length > 1) continue;
    const first = format(series.y[0], panel.unit), last = format(series.y[series.y.length - 1], panel.unit);
    parts.push(`${panel.label}, ${series.name}: from ${first} to ${last}`);
  }
  return `${figure.title}. ${parts.join("; ")}. Arrow keys move the cursor.`;
}

// With ``tall``, the panels are stretched until the drawing has that height: as tall as its neighbour.
function drawFigure(holder, figure, forcedWidth, tall) {
  const width = Math.max(forcedWidth || holder.clientWidth, 240);
  const narrow = width < NARROW && !(width > 400 && figure.panels.length === 1);
  const direct = !narrow;
  const longest = Math.max(...figure.panels.flatMap(named).map((series) => shortName(series).length), 0);
  const left = 52, right = direct && longest ? Math.min(22 + 6.9 * longest, 150) : 14;
  const rugHeight = 7, gap = 30, units = figure.panels.reduce((sum, panel) => sum + panel.height, 0);
  const unitHeight = (narrow ? 140 : 165) + (tall ? (tall - Number(holder.dataset.height)) / units : 0);
  const xs = figure.panels.flatMap((panel) => panel.series.flatMap((s) => [s.x[0], s.x[s.x.length - 1]]));
  const xLow = Math.min(...xs), xHigh = Math.max(...xs);
  const xRange = xLow === xHigh ? [xLow - 1, xHigh + 1] : [xLow, xHigh];
  const x = scaleOf(xRange, left, width - right, false);

  const root = shape("svg", { role: "img", tabindex: 0, "aria-label": spoken(figure) });
  const panels = [];
  let top = 20;
  for (const panel of figure.panels) {
    const bottom = top + unitHeight * panel.height;
    const drawn = { panel, top, bottom, range: rangeOf(panel) };
    drawn.y = scaleOf(drawn.range, bottom, top, panel.log);
    drawGrid(root, drawn, left, width - right);
    panels.push(drawn);
    top = bottom + gap;
  }
  let floor = top - gap;
  drawMarks(root, figure, x, panels[0].top, floor);
  for (const drawn of panels) drawSeries(root, drawn, x, width - right, direct);
  figure.rugs.forEach((rug, place) => {
    const at = floor + 4 + place * (rugHeight + 2);
    const d = rug.x.map((value) => `M${x(value).toFixed(1)} ${at}v${rugHeight}`).join("");
    root.append(shape("path", { class: `rug c-${rug.color}`, d, "data-count": rug.x.length },
      shape("title", {}, rug.name)));
  });
  floor += figure.rugs.length ? 2 + figure.rugs.length * (rugHeight + 2) : 0;
  drawBottomAxis(root, figure, x, xRange, floor, width - right, left);
  const height = floor + 40;
  holder.dataset.height = height;
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const tip = el("div", { class: "tip", hidden: "", role: "status" });
  holder.replaceChildren(...(direct || !longest ? [] : [legendOf(figure)]), root, tip);
  addCursor(holder, root, tip, figure, panels, { x, xRange, left, right: width - right, floor, width });
}

function drawGrid(root, drawn, left, right) {
  const { panel, top, bottom, range, y } = drawn;
  const most = Math.max(Math.floor((bottom - top) / 38), 2);
  const ticks = panel.log ? logTicks(range[0], range[1], most) : linearTicks(range[0], range[1], most, panel.unit);
  for (const tick of ticks) {
    const at = y(tick);
    root.append(shape("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }));
    root.append(shape("text", { x: left - 8, y: at + 4, "text-anchor": "end" }, format(tick, panel.unit, 3)));
  }
  root.append(shape("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  root.append(shape("text", { class: "panel-label", x: left, y: top - 8 }, panel.label));
}

function drawMarks(root, figure, x, top, bottom) {
  for (const mark of figure.marks) {
    const at = x(mark.x);
    root.append(shape("line", { class: `mark ${mark.kind}`, x1: at, x2: at, y1: top, y2: bottom },
      shape("title", {}, mark.text)));
  }
}

function drawSeries(root, drawn, x, right, direct) {
  const { panel, top, bottom, y, range } = drawn;
  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  root.append(shape("clipPath", { id: clip }, shape("rect", { x: 0, y: top - 3, width: right + 3, height: bottom - top + 5 })));
  const labels = [];
  for (const series of panel.series) {
    const line = series.style === "dots" ? "line" : series.style;
    root.append(shape("path", {
      class: `line ${line} c-${series.color}`, d: pathOf(series, x, y), "clip-path": `url(#${clip})`,
      "data-name": series.name, "data-points": series.x.length,
    }));
    if (series.style === "dots" && series.x.length <= 60)
      series.x.forEach((value, i) => {
        if (series.y[i] <= range[1])
          root.append(shape("circle", { class: `point c-${series.color}`, cx: x(value), cy: y(series.y[i]), r: 3 }));
      });
    if (named(panel).includes(series)) {
      const last = Math.min(Math.max(y(series.y[series.y.length - 1]), top), bottom);
      labels.push({ y: last + 4, text: shortName(series), color: series.color });
    }
  }
  if (!direct) return;
  spread(labels, top + 6, bottom + 4, 15);
  for (const label of labels)
    root.append(shape("text", { class: `direct c-${label.color}`, x: right + 8, y: label.y }, label.text));
}

function drawBottomAxis(root, figure, x, range, floor, right, left) {
  const most = Math.max(Math.floor((right - left) / 68), 2);
  for (const tick of linearTicks(range[0], range[1], most, figure.x_unit)) {
    const at = x(tick);
    root.append(shape("line", { class: "axis", x1: at, x2: at, y1: floor, y2: floor + 5 }));
    root.append(shape("text", { x: at, y: floor + 19, "text-anchor": "middle" }, format(tick, figure.x_unit, 3)));
  }
  root.append(shape("text", { x: right, y: floor + 36, "text-anchor": "end" }, figure.x_label));
}

// A tooltip opened by touch stays until the next touch elsewhere.
document.addEventListener("pointerdown", (event) => {
  if (hideOpen && !event.target.closest?.(".hit")) hideOpen();
});

// The cursor ---------------------------------------------------------------------------------------------------

function addCursor(holder, root, tip, figure, panels, box) {
  const hit = shape("rect", {
    class: "hit", x: box.left, y: panels[0].top, width: Math.max(box.right - box.left, 1), height: box.floor - panels[0].top,
  });
  const layer = shape("g", {});
  root.append(layer, hit);
  let at = null;

  function show(value) {
    at = Math.min(Math.max(value, box.xRange[0]), box.xRange[1]);
    if (hideOpen && hideOpen !== hide) hideOpen();
    hideOpen = hide;
    cursors.set(figure.id, at);
    const px = box.x(at);
    layer.replaceChildren(shape("line", { class: "cross", x1: px, x2: px, y1: panels[0].top, y2: box.floor }));
    const unit = figure.x_unit === "count" ? count(at, 4) : format(at, figure.x_unit);
    const rows = [el("b", {}, `${unit} ${figure.x_unit === "seconds" ? "" : figure.x_label}`.trim())];
    for (const { panel, y, top, bottom } of panels) for (const series of panel.series) {
      const place = placeAt(series, at);
      const here = series.y[place];
      if (series.style !== "target") {
        const cy = Math.min(Math.max(y(here), top), bottom);
        const cx = series.style === "step" ? px : box.x(series.x[place]);
        layer.append(shape("circle", { class: `dot c-${series.color}`, cx, cy, r: series.style === "faint" ? 2.5 : 4 }));
      }
      rows.push(el("div", { class: `c-${series.color}` },
        el("span", {}, series.name), el("span", {}, format(here, panel.unit, 5))));
    }
    const close = figure.marks.filter((mark) => Math.abs(box.x(mark.x) - px) < 5).slice(-2);
    for (const mark of close) rows.push(el("p", {}, mark.text));
    tip.replaceChildren(...rows);
    tip.hidden = false;
    const ratio = root.getBoundingClientRect().width / box.width;
    const offset = root.offsetTop || root.getBoundingClientRect().top - holder.getBoundingClientRect().top;
    const tipWidth = tip.offsetWidth;
    const wanted = px * ratio + 14;
    const fits = wanted + tipWidth < holder.clientWidth;
    tip.style.left = `${Math.max(fits ? wanted : px * ratio - tipWidth - 14, 0)}px`;
    tip.style.top = `${offset + panels[0].top * ratio + 6}px`;
  }

  function hide() {
    at = null;
    cursors.delete(figure.id);
    layer.replaceChildren();
    tip.hidden = true;
  }

  function follow(event) {
    const bounds = root.getBoundingClientRect();
    const px = (event.clientX - bounds.left) * box.width / bounds.width;
    const share = (px - box.left) / (box.right - box.left);
    show(box.xRange[0] + share * (box.xRange[1] - box.xRange[0]));
  }

  hit.addEventListener("pointermove", follow);
  hit.addEventListener("pointerdown", follow);
  hit.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide(); });
  root.addEventListener("blur", hide);
  root.addEventListener("keydown", (event) => {
    const step = (box.xRange[1] - box.xRange[0]) / 100;
    const start = at == null ? box.xRange[1] : at;
    const moves = { ArrowLeft: start - step, ArrowRight: start + step, Home: box.xRange[0], End: box.xRange[1] };
    if (event.key in moves) { show(moves[event.key]); event.preventDefault(); }
    if (event.key === "Escape") hide();
  });
  if (cursors.has(figure.id)) show(cursors.get(figure.id));
}
