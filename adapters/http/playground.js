// A request is put into the queue and its events are read from there, so that the answer does not depend on this page:
// after a reload, or on a lost connection, reading goes on behind the last event.
"use strict";

const part = (id) => document.getElementById(id);
const kept = (name) => sessionStorage.getItem("pagemill." + name) || "";
const keep = (name, value) => sessionStorage.setItem("pagemill." + name, value);

let reading = null;

function headers(more) {
  const key = part("key").value;
  return { ...(key ? { Authorization: "Bearer " + key } : {}), ...more };
}

function show(state, running) {
  part("state").textContent = state;
  part("send").disabled = running;
  part("cancel").disabled = !running;
}

async function problem(answer) {
  const body = await answer.json().catch(() => null);
  return body && body.error ? body.error.message : "status " + answer.status;
}

async function send(event) {
  event.preventDefault();
  keep("key", part("key").value);
  part("answer").textContent = "";
  show("sending", true);
  const body = {
    messages: [{ role: "user", content: part("prompt").value }],
    max_tokens: Number(part("tokens").value),
    temperature: Number(part("temperature").value),
    // Closing the page ends the answer, but a reload is in time to go on with it.
    on_disconnect: "cancel",
    watch_ms: 5000,
  };
  try {
    const answer = await fetch("/v1/requests", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify(body),
    });
    if (!answer.ok) {
      show(await problem(answer), false);
      return;
    }
    keep("id", (await answer.json()).id);
    keep("last", "0");
    keep("text", "");
    await follow();
  } catch (error) {
    show(String(error), false);
  }
}

// Reads events until the end, again and again where the connection breaks.
async function follow() {
  const id = kept("id");
  for (let wait = 250; kept("id") === id; wait = Math.min(5000, wait * 2)) {
    reading = new AbortController();
    try {
      const address = `/v1/requests/${encodeURIComponent(id)}/events`;
      const answer = await fetch(address, {
        headers: headers({ "Last-Event-ID": kept("last") }),
        signal: reading.signal,
      });
      if (answer.status === 204) {
        show("ended", false);
        return;
      }
      if (answer.status === 410 && kept("last") !== "0") {
        keep("last", "0"); // what was read is not there any more: from the start
        continue;
      }
      if (!answer.ok && answer.status !== 503) {
        show(await problem(answer), false);
        return;
      }
      if (answer.ok) {
        show("running", true);
        if (await readEvents(answer.body)) return;
        wait = 250;
      }
    } catch (error) {
      if (error.name === "AbortError") return;
    }
    show("connection lost, going on", true);
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return false;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find((text) => text.startsWith("data: "));
      if (line && take(JSON.parse(line.slice(6)))) return true;
    }
  }
}

// Takes one event; true at the last. A delta says behind which character it goes, so taking one twice does no harm.
function take(event) {
  if (event.error && !event.type) return false;
  if (event.type === "delta") keep("text", begin(kept("text"), event.text_offset) + event.text);
  if (event.type === "rewind") keep("text", begin(kept("text"), event.to_text_offset));
  keep("last", String(event.seq));
  part("answer").textContent = kept("text");
  if (event.type !== "done") return false;
  const count = event.usage ? event.usage.completion_tokens : 0;
  show(event.state === "completed" ? `${count} tokens` : (event.error || {}).message || event.state, false);
  return true;
}

// The first characters of a text, counted as the protocol does: by code points.
function begin(text, count) {
  return Array.from(text).slice(0, count).join("");
}

async function cancel() {
  await fetch(`/v1/requests/${encodeURIComponent(kept("id"))}/cancel`, { method: "POST", headers: headers({}) });
}

part("form").addEventListener("submit", send);
part("cancel").addEventListener("click", cancel);
part("key").value = kept("key");
if (kept("id")) {
  part("answer").textContent = kept("text");
  follow();
}
