// Calls to this gateway: the API key of this tab, and server-sent events read from a fetch.

const KEY = "deepmesh.key";
let asking = null; // one dialog at a time, whoever needs the key

/** The key of this tab, or "". */
export const storedKey = () => sessionStorage.getItem(KEY) ?? "";

/** Ask for the key; resolves once there is one. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    dialog.addEventListener("close", () => {
      if (input.value) sessionStorage.setItem(KEY, input.value.trim());
      input.value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** What an error answer says, in words. */
async function problem(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? text;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

/** An answer of the gateway that says no: `status`, and why as `message`. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** fetch with the key; asks for one when the gateway wants it. Throws `Refused`. */
export async function call(path, options = {}) {
  for (;;) {
    const headers = { ...options.headers };
    if (storedKey()) headers.authorization = `Bearer ${storedKey()}`;
    const response = await fetch(`../${path}`, { ...options, headers });
    if (response.ok) return response;
    if (response.status !== 401) throw new Refused(response.status, await problem(response));
    sessionStorage.removeItem(KEY);
    await askForKey();
  }
}

/** POST of a JSON body. */
export const post = (path, body, signal) =>
  call(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });

/** The events of a text/event-stream answer: `{event, data}`, data as text. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const found = { event: "message", data: "" };
        for (const line of part.split("\n")) {
          if (line.startsWith("event:")) found.event = line.slice(6).trim();
          if (line.startsWith("data:")) found.data += line.slice(5).trimStart();
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
