// The live state of the mesh: one stream of events, taken up again when it breaks.

import { call, events } from "./api.js";
import { byId } from "./dom.js";

const AGAIN_MS = 1000;
const SILENT_MS = 6000; // a state comes every second
const listeners = [];
let latest = null;

/** Be told of every state; at once of the latest, if there is one. */
export function onState(listener) {
  listeners.push(listener);
  if (latest) listener(latest);
}

function say(text, kind) {
  const pill = byId("live");
  if (pill.textContent !== text) pill.textContent = text;
  pill.className = `pill ${kind}`;
}

/** Follow the feed for as long as the page lives. */
export async function follow() {
  for (;;) {
    const controller = new AbortController();
    let alarm = 0;
    const wait = () => {
      clearTimeout(alarm);
      alarm = setTimeout(() => controller.abort(), SILENT_MS);
    };
    try {
      const response = await call("ui/api/feed?interval=1", { signal: controller.signal });
      wait();
      for await (const { event, data } of events(response)) {
        if (event !== "state") continue;
        wait();
        latest = JSON.parse(data);
        const count = (wanted) => latest.processes.filter(({ state }) => state === wanted).length;
        const bad = ["down", "restarted"].filter(count).map((word) => `${count(word)} ${word}`);
        say(["live", ...bad].join(", "), bad.length ? "bad" : "good");
        for (const listener of listeners) listener(latest);
      }
    } catch {
      // A gateway that restarts; the pill says so.
    }
    clearTimeout(alarm);
    say("no link to the gateway", "bad");
    await new Promise((resolve) => { setTimeout(resolve, AGAIN_MS); });
  }
}
