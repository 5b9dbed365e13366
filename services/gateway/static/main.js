// The page as a whole: which view is open, light or dark, and the start of each part.

import { redrawCharts, startCharts } from "./charts.js";
import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { follow } from "./feed.js";
import { startMesh } from "./mesh.js";
import { startRequests } from "./requests.js";
import { pollTimeline, startTimeline } from "./timeline.js";

const VIEWS = ["chat", "mesh", "charts", "timeline", "requests"];
const THEME = "deepmesh.theme";

function show() {
  const wanted = location.hash.slice(1);
  const open = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  for (const view of VIEWS) {
    byId(view).hidden = view !== open;
    byId(`tab-${view}`).setAttribute("aria-selected", String(view === open));
    byId(`tab-${view}`).tabIndex = view === open ? 0 : -1;
  }
  if (open === "charts") redrawCharts();
  if (open === "timeline") pollTimeline().catch(() => {});
}

/** Arrow keys move between tabs, as in any list of tabs. */
function onTabKey(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const at = VIEWS.findIndex((view) => event.target.id === `tab-${view}`);
  if (!by || at < 0) return;
  event.preventDefault();
  const next = VIEWS[(at + by + VIEWS.length) % VIEWS.length];
  location.hash = next;
  byId(`tab-${next}`).focus();
}

function startTheme() {
  const root = document.documentElement;
  const stored = localStorage.getItem(THEME);
  if (stored) root.dataset.theme = stored;
  byId("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme
      ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    localStorage.setItem(THEME, root.dataset.theme);
  });
}

startTheme();
window.addEventListener("hashchange", show);
document.querySelector("nav").addEventListener("keydown", onTabKey);
startMesh();
startRequests();
startTimeline();
// Each part stands alone: one that cannot be had now does not keep the others from starting.
const problem = (error) => console.warn(error.message);
startCharts().catch(problem);
startChat().catch(problem);
show();
follow();
