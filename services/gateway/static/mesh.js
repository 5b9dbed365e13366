// The map: processes in columns by service, lamps for their state, lines for who talks to whom.

import { byId, el, short, svg } from "./dom.js";
import { onState } from "./feed.js";

const ORDER = ["gateway", "tokenizer", "router", "scheduler", "executor", "kvstore"];
const COLUMN = 205, BOX_W = 150, BOX_H = 58, GAP = 22, TOP = 34, BOW = 26;
const CLASSES = { up: "ok", starting: "wait", down: "lost", restarted: "lost", unknown: "wait" };
const KINDS = { up: "good", down: "bad", restarted: "bad" };

/** The second line of a box: what a process has to do. */
function load(process, replicas) {
  const replica = replicas.get(process.name);
  if (!replica) return `${process.requests} requests`;
  const kv = `KV ${(100 * replica.kv_usage).toFixed(0)} %`;
  return `${replica.running} run, ${replica.waiting} wait, ${kv}`;
}

/** What else is to be known of a scheduler. */
function mood(replica) {
  if (!replica) return "";
  const role = replica.role && replica.role !== "both" ? `role ${replica.role}` : "";
  return [role, replica.paused ? "paused" : "", replica.draining ? "drains" : ""].filter(Boolean).join(", ");
}

function layout(processes) {
  const columns = ORDER.map((service) => processes.filter((p) => p.service === service));
  const used = columns.filter((column) => column.length);
  const most = Math.max(1, ...used.map((column) => column.length));
  const floor = TOP + most * (BOX_H + GAP);
  const places = new Map();
  used.forEach((column, index) => {
    const free = (most - column.length) * (BOX_H + GAP) / 2;
    column.forEach((process, row) => places.set(process.name, { column: index,
      x: 12 + index * COLUMN, y: TOP + free + row * (BOX_H + GAP) }));
  });
  return { places, floor, height: floor + 0.75 * BOW * Math.max(0, used.length - 2), width: 12 + used.length * COLUMN, used };
}

/** Straight to the next column; over others below all boxes, the farther the deeper. */
function route(a, b, floor) {
  const [left, right] = a.x <= b.x ? [a, b] : [b, a];
  const span = right.column - left.column;
  const y1 = left.y + BOX_H / 2, y2 = right.y + BOX_H / 2;
  if (span === 0) return `M${left.x} ${y1} C${left.x - 30} ${y1} ${right.x - 30} ${y2} ${right.x} ${y2}`;
  if (span === 1) {
    const x1 = left.x + BOX_W, x2 = right.x;
    return `M${x1} ${y1} C${x1 + 28} ${y1} ${x2 - 28} ${y2} ${x2} ${y2}`;
  }
  const deep = floor + BOW * (span - 1);
  const x1 = left.x + BOX_W - 12 * span, x2 = right.x + 12 * span;
  return `M${x1} ${left.y + BOX_H} C${x1 + 20} ${deep} ${x2 - 20} ${deep} ${x2} ${right.y + BOX_H}`;
}

function edge(a, b, link, floor) {
  const rate = link.sent_per_s + link.received_per_s;
  const title = `${link.from} → ${link.to}: ${short(link.sent_per_s)} messages/s, back ${short(link.received_per_s)}`;
  return svg("path", { class: "edge", d: route(a, b, floor),
    "stroke-width": 1 + Math.min(4, Math.log10(1 + rate)) }, svg("title", {}, title));
}

function node(process, place, replicas) {
  const { state } = process;
  return svg("g", { class: `node ${CLASSES[process.state] ?? "wait"}`, "data-process": process.name,
    "data-state": process.state, transform: `translate(${place.x} ${place.y})` },
    svg("title", {}, `${process.name}: ${state}`),
    svg("rect", { class: "box", width: BOX_W, height: BOX_H, rx: 8 }),
    svg("circle", { class: "lamp", cx: 14, cy: 18, r: 5 }),
    svg("text", { x: 26, y: 22 }, process.name),
    svg("text", { class: "quiet", x: 10, y: 40 }, state === "up" ? load(process, replicas) : state),
    svg("text", { class: "quiet", x: 10, y: 53 }, mood(replicas.get(process.name))));
}

function drawMap(state) {
  const replicas = new Map(state.replicas.map((replica) => [replica.name, replica]));
  const { places, floor, height, width, used } = layout(state.processes);
  const bad = state.processes.filter((p) => CLASSES[p.state] === "lost").map((p) => `${p.name} ${p.state}`);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img",
    "aria-label": bad.length ? `Mesh: ${bad.join(", ")}` : "Mesh, all processes up" });
  used.forEach((column, index) => picture.append(
    svg("text", { class: "quiet", x: 12 + index * COLUMN, y: 16 }, column[0].service)));
  for (const link of state.links) {
    const a = places.get(link.from), b = places.get(link.to);
    if (a && b) picture.append(edge(a, b, link, floor));
  }
  for (const process of state.processes) {
    picture.append(node(process, places.get(process.name), replicas));
  }
  byId("map").replaceChildren(picture);
}

function drawTable(state) {
  const replicas = new Map(state.replicas.map((replica) => [replica.name, replica]));
  const head = el("thead", {}, el("tr", {}, ["Process", "State", "Restarts", "Requests", "Talks to"].map(
    (name) => el("th", { scope: "col", class: name === "Restarts" ? "num" : "" }, name))));
  const rows = state.processes.map((process) => {
    const peers = state.links.flatMap(({ from, to }) =>
      (from === process.name ? [to] : to === process.name ? [from] : []));
    return el("tr", {}, el("td", {}, process.name), el("td", { class: KINDS[process.state] ?? "wait" }, process.state),
      el("td", { class: "num" }, String(process.restarts)),
      el("td", {}, load(process, replicas)), el("td", {}, [...new Set(peers)].join(", ")));
  });
  byId("processes").replaceChildren(el("caption", {}, "Processes"), head, el("tbody", {}, rows));
}

/** What happened to processes, the last first. */
function drawNews(state) {
  const rows = state.news.toReversed().map((news) => el("li", { "data-news": `${news.process} ${news.state}` },
    el("span", { class: "quiet" }, new Date(news.at_ms).toLocaleTimeString([], { hour12: false })), ` ${news.process} `,
    el("span", { class: KINDS[news.state] ?? "wait" }, news.state)));
  byId("news").replaceChildren(...(rows.length ? rows : [el("li", { class: "quiet" }, "Nothing since this gateway began.")]));
}

/** Draw the map with each state while its view is open. */
export function startMesh() {
  let drawn = "";
  onState((state) => {
    if (byId("mesh").hidden) return;
    const states = state.processes.map((process) => `${process.name} ${process.state}`).join();
    // Who points at something reads its tooltip: only news of a process takes it away.
    if (!byId("map").matches(":hover") || states !== drawn) drawMap(state);
    drawn = states;
    drawTable(state);
    drawNews(state);
  });
}
