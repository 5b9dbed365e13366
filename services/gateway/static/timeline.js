// Steps of all processes on one clock, as a chart to zoom into: plan N+1 lies under device step N.

import { call } from "./api.js";
import { byId, el, ms, niceStep, short, svg } from "./dom.js";

const WIDTH = 1300, LABEL = 190, TOP = 22, LANE = 30, TICK = 45;
const POLL_MS = 1000, LAST_S = 3, FIRST_S = 60;
const LEAST_US = 20, MOST_US = FIRST_S * 1e6;
const MAX_BARS = 4000;
const LOOKS = 8; // for what devices counted in a step
const KINDS = {
  plan: "c3", submit: "c6", apply: "c7", queued: "c8", device: "c4", collective: "c2",
  readback: "c5", detokenise: "c1",
};
const DUMMIES = "a rank without work of its own";

let data = null; // the records that are drawn
let range = { from: 0, to: 200_000 }; // µs from data.begin_ms
let span = 200_000;
let held = false;
let picked = 0; // number of a step

const us = (value) => ms(value / 1000);
const plot = WIDTH - LABEL - 8;
const xOf = (at) => LABEL + (at - range.from) / (range.to - range.from) * plot;

function hold(on) {
  held = on;
  byId("hold").setAttribute("aria-pressed", String(on));
}

/** Show the last `span` of what is there. */
function toNewest() {
  const end = data.slices.reduce((last, { start_us, dur_us }) => Math.max(last, start_us + dur_us), 0);
  range = { from: end - 0.95 * span, to: end + 0.05 * span };
}

function zoom(factor, at = (range.from + range.to) / 2) {
  const width = Math.max(LEAST_US, Math.min(MOST_US, (range.to - range.from) * factor));
  const share = (at - range.from) / (range.to - range.from);
  range = { from: at - share * width, to: at + (1 - share) * width };
  span = width;
  hold(true);
  draw();
}

function move(share) {
  const by = share * (range.to - range.from);
  range = { from: range.from + by, to: range.to + by };
  hold(true);
  draw();
}

/** The bars in sight; those too narrow to see stand for their neighbours. */
function visible() {
  const least = (range.to - range.from) / plot / 2;
  const ends = new Map();
  const shown = [];
  for (const slice of data.slices) {
    const end = slice.start_us + slice.dur_us;
    if (end < range.from || slice.start_us > range.to) continue;
    const lane = `${slice.track} ${slice.kind}`;
    if (slice.dur_us < least && slice.start_us < (ends.get(lane) ?? -Infinity) + least) continue;
    ends.set(lane, Math.max(end, ends.get(lane) ?? -Infinity));
    shown.push(slice);
    if (shown.length === MAX_BARS) break;
  }
  return shown;
}

function bar(slice, lanes) {
  const y = TOP + lanes.get(slice.track) * LANE;
  const x = Math.max(LABEL, xOf(slice.start_us));
  const width = Math.max(1, Math.min(WIDTH - 8, xOf(slice.start_us + slice.dur_us)) - x);
  const isPicked = picked && slice.step === picked;
  const label = slice.step ? `${slice.kind} ${slice.step}` : slice.kind;
  const shape = svg("rect", { class: `bar ${KINDS[slice.kind] ?? "c8"}${isPicked ? " picked" : ""}`,
    x, y: y + 4, width, height: LANE - 8, rx: 2, "data-step": slice.step, "data-kind": slice.kind },
    svg("title", {}, `${label}: ${us(slice.dur_us)}`));
  if (width < 9 * label.length) return [shape];
  return [shape, svg("text", { class: "inbar", x: x + 4, y: y + 19, "pointer-events": "none" }, label)];
}

function draw() {
  const place = byId("gantt");
  if (!data || !data.slices.length) {
    place.replaceChildren(el("p", { class: "empty" }, "No step in the last seconds: ask something in Chat, then Newest."));
    byId("gantt-range").textContent = "";
    return;
  }
  const used = [...new Set(data.slices.map(({ track }) => track))].sort((a, b) => a - b);
  const lanes = new Map(used.map((track, index) => [track, index]));
  const height = TOP + used.length * LANE + 4;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, width: "100%" });
  const step = niceStep(range.to - range.from, 8);
  for (let at = 0; at <= range.to - range.from; at += step) {
    const x = xOf(range.from + at);
    picture.append(svg("line", { class: "axis", x1: x, x2: x, y1: TOP - 4, y2: height }));
    if (x < WIDTH - TICK) picture.append(svg("text", { class: "quiet", x: x + 2, y: 12 }, us(at)));
  }
  for (const [track, lane] of lanes) {
    const { process, name } = data.tracks[track];
    picture.append(svg("text", { x: 2, y: TOP + lane * LANE + 19 }, name ? `${process} ${name}` : process));
  }
  for (const slice of visible()) picture.append(...bar(slice, lanes));
  const there = new Set(data.slices.map(({ kind }) => kind));
  const kinds = Object.keys(KINDS).filter((kind) => there.has(kind));
  const legend = el("div", { class: "legend" }, kinds.map((kind) =>
    el("span", {}, el("span", { class: `swatch ${KINDS[kind] ?? "c8"}` }), kind)));
  place.replaceChildren(legend, picture);
  byId("gantt-range").textContent = `${us(range.to - range.from)} of ${us((data.end_ms - data.begin_ms) * 1000)} in sight`;
}

/** What is known of a step: what it ran, for whom, and how its parts lie to each other. */
function pick(number) {
  picked = number;
  const step = data.steps.find((found) => found.step === number);
  const parts = data.slices.filter((slice) => slice.step === number)
    .sort((a, b) => a.start_us - b.start_us);
  const begin = Math.min(...parts.map(({ start_us }) => start_us));
  const head = step ? `${step.kind}, ${step.rows} rows, ${step.tokens} tokens` : DUMMIES;
  const rows = parts.map((slice) => el("tr", {}, el("td", {}, slice.kind),
    el("td", {}, data.tracks[slice.track].process),
    el("td", { class: "num" }, us(slice.start_us - begin)), el("td", { class: "num" }, us(slice.dur_us))));
  const percent = (share) => `${(100 * (share ?? 0)).toFixed(1)} %`;
  const work = parts.filter(({ flops }) => flops).map((slice) => el("p", { class: "quiet" },
    `${data.tracks[slice.track].process}: ${short(slice.flops / 1e6)} MFLOP, ${short(slice.bytes / 1e6)} MB; `,
    `${percent(slice.mfu)} MFU, ${percent(slice.bandwidth_share)} of the memory's bandwidth`));
  const who = step?.requests?.length ? el("p", { class: "quiet" }, `Requests: ${step.requests.join(", ")}`) : null;
  byId("step-detail").hidden = false;
  byId("step-detail").replaceChildren(el("h2", {}, `Step ${number}: ${head}`), ...(who ? [who] : []), ...work,
    el("table", {}, el("thead", {}, el("tr", {}, ["Part", "Process", "From", "Took"].map((name, i) =>
      el("th", { scope: "col", class: i > 1 ? "num" : "" }, name)))), el("tbody", {}, rows)));
  draw();
  if (!work.length && parts.some(({ kind }) => kind === "device")) learnWork(number, parts, LOOKS);
}

/** What devices counted comes up to a heartbeat behind their steps: perhaps not with what is drawn. */
async function learnWork(number, parts, looks) {
  const fresh = await (await call(`ui/api/timeline?last=${FIRST_S}`)).json();
  if (picked !== number) return;
  const counted = fresh.slices.filter(({ step, flops }) => step === number && flops);
  for (const slice of parts) {
    const own = counted.find(({ kind, track }) => kind === slice.kind &&
      fresh.tracks[track].process === data.tracks[slice.track].process);
    if (own) {
      const { flops, bytes, mfu, bandwidth_share } = own;
      Object.assign(slice, { flops, bytes, mfu, bandwidth_share });
    }
  }
  if (parts.some(({ flops }) => flops)) pick(number);
  else if (looks > 1) setTimeout(() => learnWork(number, parts, looks - 1), POLL_MS);
}

function pickBeside(by) {
  const numbers = [...new Set(data.slices.map(({ step }) => step))].filter(Boolean).sort((a, b) => a - b);
  if (!numbers.length) return;
  const middle = (range.from + range.to) / 2;
  const inSight = data.slices.filter(({ step }) => step).reduce((best, slice) =>
    Math.abs(slice.start_us - middle) < Math.abs(best.start_us - middle) ? slice : best);
  const at = picked ? numbers.indexOf(picked) + by : numbers.indexOf(inSight.step);
  const number = numbers[Math.max(0, Math.min(numbers.length - 1, at))];
  const first = data.slices.find(({ step, kind }) => step === number && kind === "device");
  if (first && (first.start_us < range.from || first.start_us > range.to)) {
    range = { from: first.start_us - span / 2, to: first.start_us + span / 2 };
  }
  hold(true);
  pick(number);
}

/** The records of the last seconds; of the last minute, when the page has none yet. */
async function poll() {
  if (byId("timeline").hidden || held) return;
  const last = data?.slices.length ? LAST_S : FIRST_S;
  const fresh = await (await call(`ui/api/timeline?last=${last}`)).json();
  if (held || (!fresh.slices.length && data?.slices.length)) return; // an idle mesh: what was there stays
  data = fresh;
  toNewest();
  draw();
}

const KEYS = {
  "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
  ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25),
  End: () => { hold(false); poll(); }, Enter: () => pickBeside(0),
  "[": () => pickBeside(-1), "]": () => pickBeside(1),
};

function wirePointer(place) {
  const shareOf = (event) => {
    const box = place.querySelector("svg")?.getBoundingClientRect();
    return box ? ((event.clientX - box.left) / box.width * WIDTH - LABEL) / plot : 0.5;
  };
  place.addEventListener("wheel", (event) => {
    if (!data) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, range.from + shareOf(event) * (range.to - range.from));
  }, { passive: false });
  let dragged = null;
  place.addEventListener("pointerdown", (event) => {
    dragged = { at: shareOf(event), moved: false, step: Number(event.target.dataset?.step ?? 0) };
  });
  place.addEventListener("pointermove", (event) => {
    if (!dragged || !data) return;
    const by = dragged.at - shareOf(event);
    if (Math.abs(by) < 0.005) return;
    dragged.moved = true;
    dragged.at = shareOf(event);
    move(by);
  });
  window.addEventListener("pointerup", () => {
    if (dragged && !dragged.moved && dragged.step) {
      hold(true);
      pick(dragged.step);
    }
    dragged = null;
  });
}

/** Wire buttons, keys and pointer; records are asked for while the view is open. */
export function startTimeline() {
  byId("hold").addEventListener("click", () => { hold(!held); poll(); });
  byId("zoom-in").addEventListener("click", () => data && zoom(0.5));
  byId("zoom-out").addEventListener("click", () => data && zoom(2));
  byId("earlier").addEventListener("click", () => data && move(-0.5));
  byId("later").addEventListener("click", () => data && move(0.5));
  byId("newest").addEventListener("click", () => { hold(false); poll(); });
  byId("gantt").addEventListener("keydown", (event) => {
    const act = KEYS[event.key];
    if (!act || !data) return;
    event.preventDefault();
    act();
  });
  wirePointer(byId("gantt"));
  setInterval(() => poll().catch(() => {}), POLL_MS); // the feed's pill says when the link is gone
}

export { poll as pollTimeline };
