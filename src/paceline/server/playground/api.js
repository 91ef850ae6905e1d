// What the page asks of its server.  The key stays in this module's memory.

let key = "";

export function useKey(value) {
  key = value.trim();
}

/** An answer that is not 200, in the server's words. */
export class Refused extends Error {
  constructor(status, text, code, requestId) {
    super(text);
    this.status = status;
    this.code = code;
    this.requestId = requestId;
  }
}

function headers(more = {}) {
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

const idOf = (answer) => answer.headers.get("X-Request-Id");

async function fetched(path, options) {
  const answer = await fetch(new URL(path, document.baseURI), { cache: "no-store", ...options });
  if (answer.ok) return answer;
  const text = await answer.text();
  let told = { message: text || answer.statusText };
  try {
    told = JSON.parse(text).error ?? told;
  } catch {
    // what came is no JSON: it is told as it is
  }
  throw new Refused(answer.status, told.message, told.code, idOf(answer));
}

export async function text(path) {
  return (await fetched(path, { headers: headers() })).text();
}

export async function json(path) {
  return (await fetched(path, { headers: headers() })).json();
}

/** Ask; call `begun` with the request's id, then `take` with each document of the stream. */
export async function stream(path, body, signal, begun, take) {
  const answer = await fetched(path, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  begun(idOf(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const found = JSON.parse(data);
      if (found.error) throw new Refused(500, found.error.message, found.error.code, idOf(answer));
      take(found);
    }
  }
}

/** The same request for a shell; the key is a variable there. */
export function curl(path, body) {
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const bearer = key ? ` \\\n  -H 'Authorization: Bearer '"$PACELINE_API_KEY"` : "";
  const url = new URL(path, document.baseURI);
  return `curl -N ${url}${bearer} \\\n  -H 'Content-Type: application/json' \\\n  -d '${quoted}'\n`;
}
