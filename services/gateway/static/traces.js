// Fetches the trace of a request and shows it, as soon as all processes have told of it.

import { call } from "./api.js";
import { el } from "./dom.js";
import { waterfall } from "./waterfall.js";

const LATE_MS = 600; // spans of other processes may be so much later than the answer
const TRIES = 8;

const pause = (time) => new Promise((resolve) => { setTimeout(resolve, time); });

/** The trace, once its request has ended. */
async function fetchTrace(id) {
  for (let tries = 1; tries <= TRIES; tries += 1) {
    const response = await call(`ui/api/requests/${encodeURIComponent(id)}`);
    if (response.status === 200) return response.json();
    await pause(LATE_MS); // 202: it runs, or its last span is on its way
  }
  throw new Error("No trace yet: the request runs, or was not sampled. Pick it again later.");
}

/** Show the waterfall of a request, by its id or that of its trace, in an element. */
export async function showTrace(place, id) {
  place.dataset.trace = id; // who asks last is shown
  const isWanted = () => place.dataset.trace === id;
  place.replaceChildren(el("p", { class: "quiet" }, "Reading the trace …"));
  try {
    const early = await fetchTrace(id);
    if (!isWanted()) return;
    place.replaceChildren(waterfall(early, place.clientWidth));
    await pause(LATE_MS);
    const whole = await fetchTrace(id);
    if (whole.spans.length > early.spans.length && isWanted()) {
      place.replaceChildren(waterfall(whole, place.clientWidth));
    }
  } catch (error) {
    if (isWanted()) place.replaceChildren(el("p", { class: "failed" }, error.message));
  }
}
