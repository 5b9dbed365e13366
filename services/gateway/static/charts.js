// Curves of the last minutes: what the mesh does, and how long people wait for it.

import { call } from "./api.js";
import { byId, el, ms, niceStep, short, svg } from "./dom.js";
import { onState } from "./feed.js";

const WIDTH = 520, HEIGHT = 190, LEFT = 56, RIGHT = 10, TOP = 10, BOTTOM = 24;
const KEEP_MS = 15 * 60 * 1000;
const percent = (value) => `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`;
const CHARTS = [
  { title: "Tokens a second", unit: short, lines: [
    ["output", (p) => p.output_tokens_per_s], ["prompt", (p) => p.prompt_tokens_per_s]] },
  { title: "Requests", unit: short, lines: [
    ["running", (p) => p.running], ["waiting", (p) => p.waiting], ["ended a second", (p) => p.requests_per_s]] },
  { title: "Time to first token", unit: ms, lines: [
    ["p50", (p) => p.ttft_ms?.p50], ["p90", (p) => p.ttft_ms?.p90], ["p99", (p) => p.ttft_ms?.p99]] },
  { title: "Time between tokens", unit: ms, lines: [
    ["p50", (p) => p.itl_ms?.p50], ["p90", (p) => p.itl_ms?.p90], ["p99", (p) => p.itl_ms?.p99]] },
  { title: "KV memory in use", unit: percent, most: 1, lines: [["fullest pool", (p) => p.kv_usage]] },
  { title: "Devices: share of their peaks in a step", unit: percent, lines: [
    ["MFU", (p) => p.mfu], ["memory bandwidth", (p) => p.bandwidth_share]] },
];

const points = [];
let pointed = null; // wall clock under the pointer, the same in all charts

const known = (value) => value !== null && value !== undefined;

/** A path over the points that have a value; a gap where they have none. */
function path(shown, value, x, y) {
  let text = "", open = false;
  for (const point of shown) {
    const at = value(point);
    if (!known(at)) { open = false; continue; }
    text += `${open ? "L" : "M"}${x(point.at_ms).toFixed(1)} ${y(at).toFixed(1)}`;
    open = true;
  }
  return text;
}

function axes(picture, top, unit, y, from, to, x) {
  const step = niceStep(top, 4);
  for (let at = 0; at <= top * 1.001; at += step) {
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }),
      svg("text", { class: "quiet", x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, unit(at)));
  }
  const every = niceStep((to - from) / 1000, 5) * 1000;
  for (let at = Math.ceil(from / every) * every; at <= to; at += every) {
    const time = new Date(at).toLocaleTimeString([], { hour12: false });
    picture.append(svg("text", { class: "quiet", x: x(at), y: HEIGHT - 6, "text-anchor": "middle" }, time));
  }
}

function nearest(shown) {
  if (pointed === null || !shown.length) return null;
  return shown.reduce((best, point) =>
    Math.abs(point.at_ms - pointed) < Math.abs(best.at_ms - pointed) ? point : best);
}

/** The card of a chart, made once: what is drawn in it changes under the pointer. */
function card(chart) {
  chart.legend = el("div", { class: "legend" });
  chart.picture = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: "100%",
    role: "img", "aria-label": chart.title });
  chart.picture.addEventListener("pointermove", (event) => {
    const box = chart.picture.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    const [from, to] = inSight();
    pointed = from + Math.max(0, Math.min(1, share)) * (to - from);
    redraw();
  });
  chart.picture.addEventListener("pointerleave", () => { pointed = null; redraw(); });
  return el("div", { class: "card" }, el("h2", {}, chart.title), chart.legend, chart.picture);
}

function draw(chart, shown, from, to) {
  const values = shown.flatMap((point) => chart.lines.map(([, value]) => value(point))).filter(known);
  const top = chart.most ?? (Math.max(...values, 0) * 1.1 || 1);
  const x = (at) => LEFT + (at - from) / (to - from) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM);
  const at = nearest(shown);
  const newest = at ?? shown.at(-1);
  chart.picture.replaceChildren();
  axes(chart.picture, top, chart.unit, y, from, to, x);
  chart.lines.forEach(([, value], index) => chart.picture.append(
    svg("path", { class: `line c${index + 1}`, d: path(shown, value, x, y) })));
  if (at) chart.picture.append(svg("line", { class: "cross", x1: x(at.at_ms), x2: x(at.at_ms), y1: TOP, y2: HEIGHT - BOTTOM }));
  chart.legend.replaceChildren(...chart.lines.map(([name, value], index) => {
    const now = newest && value(newest);
    return el("span", {}, el("span", { class: `swatch c${index + 1}` }), `${name} `,
      el("strong", {}, known(now) ? chart.unit(now) : "–"));
  }));
}

/** Wall clock at the left and the right edge. */
function inSight() {
  const to = points.at(-1)?.at_ms ?? Date.now();
  return [to - 1000 * Number(byId("span").value), to];
}

function redraw() {
  if (byId("charts").hidden) return;
  const [from, to] = inSight();
  const shown = points.filter(({ at_ms }) => at_ms >= from);
  for (const chart of CHARTS) draw(chart, shown, from, to);
}

function add(point) {
  if (points.length && point.at_ms <= points.at(-1).at_ms) return;
  points.push(point);
  while (points[0].at_ms < point.at_ms - KEEP_MS) points.shift();
}

/** Fill the charts from the gateway's memory, then follow. */
export async function startCharts() {
  byId("charts-grid").replaceChildren(...CHARTS.map(card));
  byId("span").addEventListener("change", redraw);
  const history = await (await call("ui/api/history")).json();
  history.points.forEach(add);
  onState((state) => { add(state.figures); redraw(); });
}

export { redraw as redrawCharts };
