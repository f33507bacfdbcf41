// The page's script without a browser: a document of a few elements, a storage that outlives reloads, Node's own fetch.
import { readFileSync } from "node:fs";
import vm from "node:vm";

const [script, base] = process.argv.slice(-2);
const stored = new Map();
const sessionStorage = {
  getItem: (name) => (stored.has(name) ? stored.get(name) : null),
  setItem: (name, value) => stored.set(name, String(value)),
};

function open() {
  const parts = {};
  for (const id of ["form", "prompt", "tokens", "temperature", "key", "send", "cancel", "state", "answer"]) {
    const on = {};
    parts[id] = { value: "", textContent: "", disabled: false, on, addEventListener: (kind, act) => (on[kind] = act) };
  }
  const leaving = new AbortController();
  const context = vm.createContext({
    document: { getElementById: (id) => parts[id] },
    sessionStorage,
    fetch: (path, options = {}) =>
      fetch(base + path, { ...options, signal: AbortSignal.any([leaving.signal, ...(options.signal ? [options.signal] : [])]) }),
    AbortController, TextDecoderStream, TextDecoder, setTimeout, encodeURIComponent, JSON, console,
  });
  vm.runInContext(readFileSync(script, "utf8"), context);
  return { parts, close: () => leaving.abort() };
}

async function until(condition) {
  for (let tries = 0; !condition(); tries++) {
    if (tries > 3000) throw new Error("waited in vain");
    await new Promise((done) => setTimeout(done, 10));
  }
}

function send(page, prompt, tokens) {
  page.parts.prompt.value = prompt;
  page.parts.tokens.value = String(tokens);
  page.parts.temperature.value = "0";
  page.parts.form.on.submit({ preventDefault() {} });
}

const first = open();
send(first, "Tell a long story.", 60);
await until(() => first.parts.answer.textContent.length > 5);
first.close(); // the page is left in the middle of its answer
const before = first.parts.answer.textContent;
const second = open(); // and opened again
await until(() => /^\d+ tokens$/.test(second.parts.state.textContent));
const record = await (await fetch(`${base}/v1/requests/${stored.get("pagemill.id")}`)).json();
const whole = record.choices[0].text;
const third = open(); // after the end there is nothing more to come
await until(() => third.parts.state.textContent === "ended");
const kept = third.parts.answer.textContent;
send(third, "Count for ever.", 400);
await until(() => third.parts.state.textContent === "running");
third.parts.cancel.on.click();
await until(() => third.parts.state.textContent === "the request was cancelled");
third.close();
console.log(JSON.stringify({ before, after: second.parts.answer.textContent, whole, kept }));
process.exit(0);
