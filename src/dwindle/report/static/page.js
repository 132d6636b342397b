"use strict";
// Builds the page from the embedded data; a live page polls its server every two seconds.

const REFRESH_MS = 2000;
const PRINT_WIDTH = 680;
const state = { data: null, layer: 0, links: [] };

function dataLink(name, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value)], { type: "application/json" }));
  state.links.push(url);
  return el("a", { class: "data", href: url, download: `${name}.json`, "aria-label": `data of ${name} as JSON` }, "data");
}

function head(title, name, value) {
  return el("div", { class: "head" }, el("h3", {}, title), value === undefined ? null : dataLink(name, value));
}

function tileOf(tile) {
  return el("li", { class: tile.tone || null }, el("span", { class: "label" }, tile.label),
    el("span", { class: "value" }, tile.value), el("span", { class: "note" }, tile.note));
}

// A titled part of the page; without parts, nothing.
function partOf(title, text, cards) {
  const kept = cards.filter((card) => card);
  if (!kept.length) return [];
  const narrow = kept.filter((card) => card.matches("figure:not(.wide)"));
  if (narrow.length % 2) narrow[narrow.length - 1].classList.add("wide");  // no empty half
  return [el("section", { class: "part" }, title ? el("h2", {}, title) : null, text ? el("p", { class: "lead" }, text) : null,
    el("div", { class: "figures" }, ...kept))];
}

// What source and result make of the same beginnings.
function samplesOf(samples) {
  if (!samples.length) return null;
  const said = (name, prompt, text) => el("div", { class: "said" }, el("span", { class: "label" }, name),
    el("p", {}, el("span", { class: "prompt" }, prompt), text));
  return el("section", { class: "card wide", id: "samples" }, head("Samples", "samples", samples),
    el("p", { class: "caption" }, "The likeliest continuation of held-out text (grey), token by token."),
    ...samples.map((sample) => el("div", { class: "sample" }, said("source", sample.prompt, sample.source),
      sample.result == null ? null : said("result", sample.prompt, sample.result))));
}

function missingOf(lines) {
  if (!lines.length) return null;
  return el("aside", { class: "missing", "aria-label": "Missing data" }, el("h2", {}, "Missing data"),
    el("ul", {}, ...lines.map((line) => el("li", {}, line))));
}

function figureOf(figure) {
  const plot = el("div", { class: "plot" });
  const card = el("figure", { class: figure.wide ? "card wide" : "card", id: figure.id },
    head(figure.title, figure.id, figure), el("figcaption", { class: "caption" }, figure.caption), plot);
  card.draw = (width, tall) => drawFigure(plot, figure, width, tall);
  card.level = () => Number(plot.dataset.height);
  return card;
}

function architectureOf(view) {
  const rows = el("div", { class: "rows" }), map = el("div", { class: "map" });
  const totals = el("table", {}, el("thead", {}, el("tr", {}, ...["", "before", "after"].map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, ...view.totals.map((row) => el("tr", {}, ...row.map((text) => el("td", {}, text))))));
  const kind = view.regular ? "Grouped-query attention: within a layer every key/value head serves the same number of query heads." :
    "Cluster attention: key/value heads may serve different numbers of query heads.";
  const few = view.layers.length <= 10;
  const card = el("figure", { class: "card wide", id: "architecture" }, head("Architecture before and after", "architecture", view),
    el("figcaption", { class: "caption" }, `Filled parts were kept; indices are the source's. ${kind} Select a layer to see its heads.`),
    el("div", { class: few ? "anatomy few" : "anatomy" }, rows, el("div", { class: "detail" }, totals, map)));
  card.draw = (width) => {
    const choose = (layer) => {
      state.layer = layer;
      for (const row of rows.querySelectorAll(".row")) row.setAttribute("aria-pressed", String(Number(row.dataset.layer) === layer));
      drawMap(map, view, layer);
    };
    state.layer = Math.min(state.layer, view.layers.length - 1);
    drawArchitecture(rows, view, state.layer, choose, width);
    drawMap(map, view, state.layer);
  };
  return card;
}

function tableOf(table) {
  const cells = (tag, row) => row.map((text) => el(tag, tag === "th" ? { scope: "col" } : {}, text));
  const body = table.rows.map((row, place) => el("tr", { class: table.strong.includes(place) ? "strong" : null }, ...cells("td", row)));
  return el("section", { class: "card wide", id: table.id }, head(table.title, table.id, table),
    el("p", { class: "caption" }, table.note),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": table.title },
      el("table", {}, el("thead", {}, el("tr", {}, ...cells("th", table.columns))), el("tbody", {}, ...body))));
}

function recipeOf(text, open) {
  return el("section", { class: "card wide recipe", id: "recipe" },
    el("details", open ? { open: "" } : {}, el("summary", {}, "Recipe"), el("pre", { tabindex: 0 }, text)));
}

function build(data) {
  for (const url of state.links.splice(0)) URL.revokeObjectURL(url);
  const open = document.querySelector("#recipe details")?.open ?? false;
  state.data = data;
  document.title = `${data.name} · dwindle`;
  const figures = new Map(data.figures.map((figure) => [figure.id, figureOf(figure)]));
  const take = (...names) => names.map((name) => figures.get(name));
  const title = el("h1", {}, data.name, el("span", { class: `status ${data.status}` }, data.status_text));
  document.querySelector("main").replaceChildren(...[
    el("header", {}, title, el("p", { class: "story" }, data.verdict)),
    missingOf(data.missing),
    el("ul", { class: "tiles", "aria-label": "Summary" }, ...data.tiles.map(tileOf)),
    ...partOf("", "", [...take("loss"), samplesOf(data.samples), ...take("tasks"), ...data.tables.map(tableOf)]),
    ...partOf("How it was pruned", data.removed, [data.architecture ? architectureOf(data.architecture) : null,
      ...take("saliency", "share", "layers")]),
    ...partOf("How it was trained", "", [...take("throughput", "optimizer"), data.cost ? tableOf(data.cost) : null,
      data.recipe == null ? null : recipeOf(data.recipe, open)]),
    el("footer", {}, `Made with dwindle ${data.version} from the logs of the run. ` +
      "Long series are thinned; their minima and maxima are kept."),
  ].filter((part) => part));
  draw();
}

function draw(width) {
  const waiting = [];  // the left of two cards side by side
  for (const card of document.querySelectorAll("figure.card")) {
    const own = width && (card.classList.contains("wide") ? width : width / 2 - 28);
    const beside = card.matches(".wide") ? null : waiting.pop();
    card.draw(own);
    if (card.matches(".wide") || !card.level) continue;
    if (!beside) { waiting.push(card); continue; }
    const tall = Math.max(card.level(), beside.level());
    for (const one of [card, beside]) if (one.level() < tall) one.draw(own, tall);
  }
  document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn || 0) + 1);
}

// A selector of the focused element that still matches after a rebuild.
function focusPath() {
  const here = document.activeElement;
  const card = here?.closest("figure.card, section.card");
  if (!card) return null;
  if (here.dataset.layer) return `#${card.id} [data-layer="${here.dataset.layer}"]`;
  return `#${card.id} ${here.localName}${here.classList.length ? "." + here.classList[0] : ""}`;
}

async function refresh(address, tag) {
  try {
    if (!document.hidden) {
      const reply = await fetch(address, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (reply.status === 200) {
        tag = reply.headers.get("ETag");
        const at = window.scrollY, focus = focusPath();
        build(await reply.json());
        window.scrollTo(0, at);
        if (focus) document.querySelector(focus)?.focus({ preventScroll: true });
      }
    }
  } catch {
    // The server has stopped or is restarting: keep the page as it is.
  }
  setTimeout(() => refresh(address, tag), REFRESH_MS);
}

const started = performance.now();
build(JSON.parse(document.getElementById("run-data").textContent));
document.documentElement.dataset.drawMs = String(Math.round(performance.now() - started));

let drawnWidth = document.documentElement.clientWidth;
window.addEventListener("resize", () => requestAnimationFrame(() => {
  if (document.documentElement.clientWidth === drawnWidth) return;
  drawnWidth = document.documentElement.clientWidth;
  draw();
}));
window.addEventListener("beforeprint", () => {
  const details = document.querySelector("#recipe details");
  if (details) details.open = true;
  draw(PRINT_WIDTH);
});
window.addEventListener("afterprint", () => draw());

const live = document.documentElement.dataset.live;
if (live) refresh(live, document.documentElement.dataset.tag);
