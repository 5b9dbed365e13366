// The playground: a conversation over /v1/chat/completions, streamed, with everything beside it.

import { call, events, post } from "./api.js";
import { byId, el, ms } from "./dom.js";
import { showTrace } from "./traces.js";

const messages = []; // what the next request sends, as the API has it
let running = null; // AbortController of the answer that streams
let lastTools = []; // calls of the last answer that want a result
let listed = null; // promise of the list of models: without it there is nothing to ask

const number = (id) => {
  const text = byId(id).value.trim();
  return text === "" ? undefined : Number(text);
};

/** The request's fields from the form; throws a text that names the field. */
function parameters() {
  const body = {
    model: byId("p-model").value,
    thinking: { type: byId("p-thinking").value },
    temperature: number("p-temperature"),
    top_p: number("p-top_p"),
    max_tokens: number("p-max_tokens"),
    seed: number("p-seed"),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (byId("p-stop").value) body.stop = [byId("p-stop").value];
  const tools = byId("p-tools");
  tools.removeAttribute("aria-invalid");
  if (tools.value.trim()) {
    try {
      body.tools = JSON.parse(tools.value);
      body.tool_choice = byId("p-tool_choice").value;
    } catch (error) {
      tools.setAttribute("aria-invalid", "true");
      throw new Error(`Tools (JSON): ${error.message}`);
    }
  }
  const system = byId("p-system").value.trim();
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  return body;
}

const addTurn = (...children) => {
  const turn = el("li", { class: "turn" }, ...children);
  byId("turns").append(turn);
  turn.scrollIntoView({ block: "nearest" });
  return turn;
};

function addUser(text, role = "user") {
  const what = role === "tool" ? el("strong", {}, "Result of the tool: ") : null;
  addTurn(el("div", { class: "text" }, what, text)).classList.add("user");
}

/** An answer on the page, filled while it streams. */
class Answer {
  constructor() {
    this.message = { role: "assistant", content: "" };
    this.began = performance.now();
    this.first = 0;
    this.finish = "";
    this.usage = null;
    this.reasoning = el("div", { class: "text" });
    this.folded = el("details", { hidden: true }, el("summary", {}, "Reasoning"), this.reasoning);
    this.text = el("div", { class: "text", "data-part": "content" });
    this.tools = el("div", {});
    this.meta = el("div", { class: "meta quiet" }, "…");
    this.turn = addTurn(this.folded, this.text, this.tools, this.meta);
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message ?? JSON.stringify(chunk.error));
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning) {
      this.message.reasoning_content = (this.message.reasoning_content ?? "") + reasoning;
      this.folded.hidden = false;
      this.reasoning.append(reasoning);
    }
    if (delta.content) {
      this.message.content += delta.content;
      this.text.append(delta.content);
    }
    for (const part of delta.tool_calls ?? []) this.takeTool(part);
    if ((reasoning || delta.content || delta.tool_calls) && !this.first) this.first = performance.now();
    this.finish = choice.finish_reason ?? this.finish;
  }

  takeTool(part) {
    const calls = (this.message.tool_calls ??= []);
    const found = (calls[part.index ?? 0] ??= {
      id: "", type: "function", function: { name: "", arguments: "" },
    });
    found.id = part.id ?? found.id;
    found.function.name += part.function?.name ?? "";
    found.function.arguments += part.function?.arguments ?? "";
    this.tools.replaceChildren(...calls.map((made) => el("div", { class: "tool" },
      el("strong", {}, `Calls ${made.function.name}`), el("pre", {}, made.function.arguments))));
  }

  /** What is known once it is over, and the way to its waterfall. */
  close(problem, traceId) {
    const took = performance.now() - this.began;
    const tokens = this.usage?.completion_tokens;
    const parts = [];
    if (problem) parts.push(el("span", { class: "failed" }, problem));
    if (this.finish) parts.push(el("span", {}, `ended: ${this.finish}`));
    if (this.first) parts.push(el("span", {}, `first token ${ms(this.first - this.began)}`));
    parts.push(el("span", {}, `whole ${ms(took)}`));
    if (tokens !== undefined) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      parts.push(el("span", {}, `${this.usage.prompt_tokens} + ${tokens} tokens${cached ? `, ${cached} cached` : ""}`));
      const rate = tokens / Math.max(1e-3, (took - (this.first - this.began || 0)) / 1000);
      if (this.first) parts.push(el("span", {}, `${rate.toFixed(0)} tokens/s`));
    }
    if (traceId) {
      parts.push(el("button", { type: "button", onclick: () => this.pick(traceId) }, "Waterfall"));
    }
    this.meta.replaceChildren(...parts);
    this.addResultFields();
  }

  pick(traceId) {
    for (const turn of document.querySelectorAll(".turn.picked")) turn.classList.remove("picked");
    this.turn.classList.add("picked");
    byId("beside").hidden = false;
    byId("parameters").open = false; // both do not fit on most screens
    showTrace(byId("answer-waterfall"), traceId);
  }

  /** One field for each tool that was called: its result goes back as the next message. */
  addResultFields() {
    lastTools = this.message.tool_calls ?? [];
    lastTools.forEach((made, index) => {
      const field = el("input", { type: "text", "aria-label": `Result of ${made.function.name}`,
        placeholder: "result", "data-tool": index });
      this.tools.children[index]?.append(field);
    });
    if (lastTools.length) {
      this.tools.append(el("button", { type: "button", onclick: () => this.sendResults() }, "Send the results"));
    }
  }

  sendResults() {
    for (const [index, made] of lastTools.entries()) {
      const content = this.tools.querySelector(`[data-tool="${index}"]`).value;
      messages.push({ role: "tool", tool_call_id: made.id, content });
      addUser(content, "tool");
    }
    this.tools.querySelectorAll("input, button").forEach((field) => { field.disabled = true; });
    run();
  }
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = running !== null;
  byId("stop").disabled = running === null;
  byId("again").disabled = running !== null || !messages.some(({ role }) => role === "assistant");
}

/** Ask with the conversation as it is; the answer becomes part of it. */
async function run() {
  if (running) return;
  const controller = new AbortController();
  setRunning(controller);
  let body;
  try {
    await (listed ??= listModels());
    body = parameters();
  } catch (error) {
    listed = byId("p-model").value ? listed : null; // asked for again with the next message
    addTurn(el("div", { class: "failed" }, error.message));
    setRunning(null);
    return;
  }
  const answer = new Answer();
  let problem = "", traceId = "";
  try {
    const response = await post("v1/chat/completions", body, controller.signal);
    traceId = response.headers.get("x-trace-id") ?? "";
    for await (const { data } of events(response)) {
      if (data !== "[DONE]") answer.take(JSON.parse(data));
    }
  } catch (error) {
    problem = error.name === "AbortError" ? "stopped" : error.message;
  }
  if (answer.message.content || answer.message.tool_calls) messages.push(answer.message);
  answer.close(problem, traceId);
  setRunning(null);
  byId("text").focus();
}

function send() {
  const text = byId("text").value.trim();
  if (!text || running) return;
  messages.push({ role: "user", content: text });
  addUser(text);
  byId("text").value = "";
  run();
}

function again() {
  while (messages.length && messages.at(-1).role === "assistant") messages.pop();
  run();
}

async function listModels() {
  const response = await call("v1/models");
  const { data } = await response.json();
  byId("p-model").replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
}

/** Wire the form; the models come from the gateway. */
export function startChat() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("again").addEventListener("click", again);
  byId("clear").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    byId("turns").replaceChildren();
    byId("beside").hidden = true;
    setRunning(null);
  });
  listed = listModels();
  return listed;
}
