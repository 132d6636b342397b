"use strict";
// The model before and after: a row per layer, and the query → key/value map of the selected one.

function drawArchitecture(holder, view, chosen, choose, forcedWidth) {
  const width = Math.max(forcedWidth || holder.clientWidth, 260);
  const small = width < 480;
  const heads = Math.max(...view.layers.map((layer) => layer.kv_of_query.length));
  const groups = Math.max(...view.layers.map((layer) => groupsOf(layer).length));
  const widest = Math.max(...view.layers.map((layer) => layer.ffn[0]), 1);
  const left = small ? 24 : 46, text = small ? 42 : 84, tail = small ? 46 : 92;
  const inner = width - left - text - tail - 10;
  const room = inner * (small ? 0.5 : 0.46);
  const single = view.layers.every((layer) => groupsOf(layer).length === layer.kv_of_query.length);
  const gap = groups > 1 && !single ? (groups > 16 ? 1 : 4) : 0;
  const few = view.layers.length <= 10;  // then rows are taller
  const side = Math.min(Math.max((room - gap * (groups - 1)) / heads - 1, 2), few ? 20 : 15);
  const headsWidth = heads * (side + 1) + gap * (groups - 1);
  const rowHeight = Math.max(side + 9, few ? Math.min(200 / view.layers.length, 34) : 17);
  const ffnLeft = left + headsWidth + text + 10, ffnWidth = Math.max(width - ffnLeft - tail, 30);
  const top = 66;
  const root = shape("svg", { viewBox: `0 0 ${width} ${top + rowHeight * view.layers.length + 6}`, role: "group",
    "aria-label": "Layers of the model before and after" });
  drawHidden(root, view, left, width - tail, small);
  const title = (x, words) => root.append(shape("text", { class: "panel-label", x, y: top - 10 }, words));
  const shared = headsWidth + text > 190 ? "query heads, by key/value head" : "q / kv heads";
  title(left, single ? "attention heads" : shared);
  title(ffnLeft, small ? "FFN" : "FFN channels");
  view.layers.forEach((layer, index) => {
    const y = top + index * rowHeight;
    const row = shape("g", { class: "row", tabindex: 0, role: "button", "aria-pressed": String(index === chosen),
      "aria-label": layerText(layer, index), "data-layer": index });
    row.append(shape("rect", { class: "band", x: 0, y, width, height: rowHeight }));
    row.append(shape("text", { x: left - 8, y: y + rowHeight / 2 + 4, "text-anchor": "end" }, String(index)));
    drawHeads(row, layer, left, y + (rowHeight - side) / 2 - (single ? 0 : 2), side, gap, single);
    const kept = layer.kv_of_query.length - layer.gone_queries.length;
    row.append(shape("text", { class: "num", x: left + headsWidth + 8, y: y + rowHeight / 2 + 4 },
      single ? `${kept}${small ? "" : ` of ${layer.kv_of_query.length}`}`
        : small ? `${kept}/${layer.kv[1]}` : `${kept} q · ${layer.kv[1]} kv`));
    drawFfn(row, layer, ffnLeft, y + (rowHeight - side) / 2, ffnWidth / widest, side, small);
    row.addEventListener("click", () => choose(index));
    row.addEventListener("keydown", (event) => {
      const to = { Enter: index, " ": index, ArrowDown: index + 1, ArrowUp: index - 1 }[event.key];
      if (to == null || to < 0 || to >= view.layers.length) return;
      event.preventDefault();
      choose(to);
      root.querySelector(`[data-layer="${to}"]`).focus();
    });
    root.append(row);
  });
  holder.replaceChildren(root);
}

function groupsOf(layer) {
  const groups = new Map();
  layer.kv_of_query.forEach((kv, query) => {
    if (!groups.has(kv)) groups.set(kv, []);
    groups.get(kv).push(query);
  });
  return [...groups].map(([kv, queries]) => ({ kv, queries }));
}

function layerText(layer, index) {
  const all = layer.kv_of_query.length;
  return `Layer ${index}: ${all - layer.gone_queries.length} of ${all} query heads, ${layer.kv[1]} of ${layer.kv[0]} ` +
    `key/value heads, ${layer.ffn[1].toLocaleString("en")} of ${layer.ffn[0].toLocaleString("en")} FFN channels`;
}

function drawHidden(root, view, left, right, small) {
  const [before, after] = view.hidden;
  const width = right - left;
  const kept = width * after / Math.max(before, 1);
  root.append(shape("text", { class: "panel-label", x: left, y: 10 }, "hidden channels (all layers)"));
  root.append(shape("rect", { class: "lost", x: left, y: 17, width, height: 13, rx: 2 }));
  root.append(shape("rect", { class: "kept c-stem", x: left, y: 17, width: kept, height: 13, rx: 2 }));
  root.append(shape("text", { class: "num", x: right + 8, y: 28 }, words(after, before, small)));
}

function drawHeads(row, layer, left, y, side, gap, single) {
  const gone = new Set(layer.gone_queries);
  let x = left;
  for (const { kv, queries } of groupsOf(layer)) {
    const start = x;
    for (const query of queries) {
      const out = gone.has(query);
      const size = out ? side - 1 : side;
      row.append(shape("rect", { class: out ? "gone" : "kept c-attn", x: x + (out ? 0.5 : 0), y: y + (out ? 0.5 : 0),
        width: Math.max(size, 1), height: Math.max(size, 1), rx: Math.min(2, side / 4) },
      shape("title", {}, `query ${query} → key/value ${kv}${out ? ", removed" : ""}`)));
      x += side + 1;
    }
    const alive = queries.some((query) => !gone.has(query));
    if (!single) row.append(shape("rect", { class: alive ? "kept c-kv" : "lost", x: start, y: y + side + 1.5, width: Math.max(x - start - 1, 1),
      height: 2.5 }));
    x += gap;
  }
}

function drawFfn(row, layer, left, y, scale, height, small) {
  const [before, after] = layer.ffn;
  row.append(shape("rect", { class: "lost", x: left, y, width: before * scale, height, rx: 2 }));
  row.append(shape("rect", { class: "kept c-ffn", x: left, y, width: Math.max(after * scale, 0), height, rx: 2 }));
  row.append(shape("text", { class: "num", x: left + before * scale + 8, y: y + height / 2 + 4 }, words(after, before, small)));
}

function words(after, before, small) {
  return small ? after.toLocaleString("en") : `${after.toLocaleString("en")} of ${before.toLocaleString("en")}`;
}

// Query heads above, key/value heads below, a line for each kept query head (the paper's Fig. 8).
function drawMap(holder, view, chosen) {
  const layer = view.layers[chosen];
  const groups = groupsOf(layer);
  const gone = new Set(layer.gone_queries);
  const pitch = 27, gap = 10, level = 118, room = holder.clientWidth || 360;
  const under = shape("g", {}), over = shape("g", {});
  let x = 4, y = 0, width = 0;
  for (const { kv, queries: members } of groups) {
    if (x > 4 && x + members.length * pitch + 4 > room) { x = 4; y += level; }
    const middle = x + members.length * pitch / 2;
    const alive = members.some((query) => !gone.has(query));
    members.forEach((query, place) => {
      const cx = x + (place + 0.5) * pitch, out = gone.has(query);
      if (!out) under.append(shape("path", { class: "link", d: `M${cx} ${y + 24}C${cx} ${y + 62} ${middle} ${y + 58} ${middle} ${y + 96}` }));
      over.append(shape("g", { class: out ? "node out" : "node" },
        shape("circle", { class: out ? "gone" : "kept c-attn", cx, cy: y + 24, r: 11, "stroke-dasharray": out ? "3 2" : null }),
        shape("text", { x: cx, y: y + 28, "text-anchor": "middle" }, String(query))));
    });
    over.append(shape("g", { class: alive ? "node" : "node out" },
      shape("rect", { class: alive ? "kept c-kv" : "gone", x: middle - 12, y: y + 88, width: 24, height: 22, rx: 5,
        "stroke-dasharray": alive ? null : "3 2" }),
      shape("text", { x: middle, y: y + 103, "text-anchor": "middle" }, String(kv))));
    x += members.length * pitch + gap;
    width = Math.max(width, x - gap + 4);
  }
  const root = shape("svg", { viewBox: `0 0 ${width} ${y + 128}`, role: "img", "aria-label": layerText(layer, chosen) });
  root.style.maxWidth = `${width}px`;
  root.append(under, over);
  holder.replaceChildren(
    el("h4", {}, `Layer ${chosen}: query heads and their key/value heads`),
    el("p", {}, layerText(layer, chosen).replace(/^Layer \d+: /, "") + "."),
    el("ul", { class: "legend" }, el("li", { class: "box c-attn" }, "query head"),
      el("li", { class: "box c-kv" }, "key/value head"), el("li", { class: "box gone" }, "removed")),
    root);
}
