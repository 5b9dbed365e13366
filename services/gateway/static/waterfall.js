// The spans of one request as bars on one clock: whose time it was, and who waited for whom.

import { el, ms, niceStep, svg } from "./dom.js";

const ROW = 20, LABEL = 175, TOP = 22, TICK = 45, MAX_ROWS = 120;
const LEAST_WIDTH = 420;
const COLOURS = {
  gateway: "c1", tokenizer: "c2", router: "c6", scheduler: "c3", executor: "c4", kvstore: "c5",
};

/** The class that colours a service. */
export const colourOf = (service) => COLOURS[service] ?? "c8";

const us = (value) => ms(value / 1000);

function describe(span) {
  const lines = [`${span.title} in ${span.process}: ${us(span.dur_us)}, from ${us(span.start_us)}`];
  for (const [key, value] of Object.entries(span.attributes)) lines.push(`${key} = ${value}`);
  if (span.error) lines.push(`error: ${span.error}`);
  return lines.join("\n");
}

function chart(spans, totalUs, width) {
  const scale = (width - LABEL) / Math.max(totalUs, 1);
  const height = TOP + spans.length * ROW + 6;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `Waterfall: ${spans.length} spans over ${us(totalUs)}` });
  const step = niceStep(totalUs, width / 110);
  for (let at = 0; at <= totalUs; at += step) {
    const x = LABEL + at * scale;
    picture.append(svg("line", { class: "axis", x1: x, x2: x, y1: TOP - 4, y2: height }));
    if (x < width - TICK) picture.append(svg("text", { class: "quiet", x: x + 2, y: 12 }, us(at)));
  }
  spans.forEach((span, index) => {
    const y = TOP + index * ROW;
    const x = LABEL + Math.max(0, span.start_us) * scale;
    const length = Math.max(1.5, Math.min(span.dur_us * scale, width - x));
    const indent = 8 * Math.min(span.depth, 6);
    picture.append(svg("g", { class: "span" }, svg("title", {}, describe(span)),
      svg("text", { x: 2 + indent, y: y + 14 }, span.title.slice(0, 26 - indent / 6)),
      svg("rect", { class: `bar ${colourOf(span.service)}${span.waits ? " waits" : ""}`,
        x, y: y + 3, width: length, height: ROW - 6, rx: 2 })));
  });
  return picture;
}

function table(spans) {
  const head = ["Span", "Process", "From", "Took"].map((name, i) =>
    el("th", { scope: "col", class: i > 1 ? "num" : "" }, name));
  const body = spans.map((span) => el("tr", { title: describe(span) }, el("td", {}, span.title),
    el("td", {}, span.process), el("td", { class: "num" }, us(Math.max(0, span.start_us))),
    el("td", { class: "num" }, us(span.dur_us))));
  return el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
}

/** An element, `width` pixels wide, that shows a trace as GET ui/api/requests/ID gives it. */
export function waterfall(trace, width) {
  const drawn = el("div", {});
  const withHops = el("input", { type: "checkbox" });
  const draw = () => {
    const spans = trace.spans.filter(({ name }) => withHops.checked || name !== "hop");
    const services = [...new Set(spans.map(({ service }) => service))];
    const legend = el("div", { class: "legend" }, services.map((name) =>
      el("span", {}, el("span", { class: `swatch ${colourOf(name)}` }), name)),
      el("span", { class: "quiet" }, "pale: waits for others"));
    const left = spans.length - MAX_ROWS;
    drawn.replaceChildren(legend, chart(spans.slice(0, MAX_ROWS), trace.duration_ms * 1000, Math.max(width, LEAST_WIDTH)),
      left > 0 ? el("p", { class: "quiet" }, `${left} more in the table`) : "",
      el("details", {}, el("summary", {}, "As a table"), table(spans)));
  };
  withHops.addEventListener("change", draw);
  draw();
  const hops = trace.spans.filter(({ name }) => name === "hop").length;
  return el("div", { class: "waterfall" },
    el("p", { class: "quiet" }, `${ms(trace.duration_ms)}, ${trace.spans.length} spans, `,
      `${(100 * trace.explained).toFixed(1)} % explained`),
    hops ? el("label", { class: "quiet" }, withHops, ` with the ${hops} messages`) : null, drawn);
}
