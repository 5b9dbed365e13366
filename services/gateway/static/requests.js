// The list of requests, and the waterfall of the one that is picked.

import { byId, el, ms } from "./dom.js";
import { onState } from "./feed.js";
import { showTrace } from "./traces.js";

const HEAD = ["Began", "Request", "Protocol", "State", "First token", "Whole", "Prompt", "Cached", "Output", "Ended by"];
const NUMBERS = new Set(["First token", "Whole", "Prompt", "Cached", "Output"]);
let picked = "";

const known = (value, unit) => (value === null || value === undefined ? "–" : unit(value));

function pick(id) {
  picked = id;
  byId("request-detail").hidden = false;
  byId("request-detail").replaceChildren(el("h2", {}, `Where the time of ${id.slice(0, 12)} went`),
    el("div", { id: "request-waterfall" }));
  showTrace(byId("request-waterfall"), id);
}

function row(request) {
  const kind = { done: "good", failed: "bad", gone: "bad" }[request.state] ?? "wait";
  const cells = [
    new Date(request.started_ms).toLocaleTimeString([], { hour12: false }),
    el("button", { type: "button", class: "link", title: request.request_id,
      onclick: (event) => { event.stopPropagation(); pick(request.id); } }, request.id.slice(0, 12)),
    request.protocol,
    el("span", { class: kind, title: request.error ?? "" }, `${request.state} ${request.status || ""}`),
    known(request.ttft_ms, ms), known(request.duration_ms, ms),
    known(request.prompt_tokens, String), known(request.cached_tokens, String),
    known(request.output_tokens, String), request.finish_reason || request.error || "",
  ];
  return el("tr", { class: `pick${request.id === picked ? " picked" : ""}`, "data-request": request.id,
    onclick: () => pick(request.id) },
    cells.map((cell, index) => el("td", { class: NUMBERS.has(HEAD[index]) ? "num" : "" }, cell)));
}

function draw(requests) {
  const list = byId("request-list");
  const focused = document.activeElement?.closest("tr[data-request]")?.dataset.request;
  const head = el("thead", {}, el("tr", {}, HEAD.map((name) =>
    el("th", { scope: "col", class: NUMBERS.has(name) ? "num" : "" }, name))));
  const body = el("tbody", {}, requests.map(row));
  if (!requests.length) body.append(el("tr", {}, el("td", { class: "empty", colspan: HEAD.length }, "None yet: ask something in Chat.")));
  list.replaceChildren(el("caption", {}, "Requests, the last first"), head, body);
  if (focused) list.querySelector(`tr[data-request="${focused}"] button`)?.focus();
}

/** Draw the list with each state while its view is open. */
export function startRequests() {
  onState((state) => {
    if (!byId("requests").hidden) draw(state.requests);
  });
}
