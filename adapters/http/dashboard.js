// Reads the figures every second and shows them. What comes from Redis is only ever put in as text.
"use strict";

const EVERY_MS = 1000;
const part = (id) => document.getElementById(id);
const before = new Map(); // engine -> when its tokens were last counted, and how many
let timer = 0;

function make(kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

const number = (value, digits = 0) =>
  Number.isFinite(value) ? value.toLocaleString("en", { maximumFractionDigits: digits }) : "–";
const share = (part, whole) => (whole ? number((100 * part) / whole, 1) + " %" : "–");

function say(text, wrong = false) {
  part("state").textContent = text;
  part("state").className = wrong ? "wrong" : "";
}

async function look() {
  clearTimeout(timer);
  try {
    const key = sessionStorage.getItem("pagemill.key") || "";
    const answer = await fetch("/overview.json", key ? { headers: { Authorization: "Bearer " + key } } : {});
    if (answer.status === 401) {
      part("form").hidden = false;
      part("queues").replaceChildren();
      say(key ? "the key is not known" : "an API key is needed", Boolean(key));
      return;
    }
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error.message);
    part("form").hidden = true;
    part("queues").replaceChildren(...Object.entries(body.queues).map(([name, queue]) => showQueue(name, queue)));
    say(new Date().toLocaleTimeString());
  } catch (error) {
    say(error instanceof TypeError ? "the gateway does not answer" : error.message, true);
  }
  timer = setTimeout(look, EVERY_MS);
}

function showQueue(name, queue) {
  const section = make("section");
  section.append(make("h2", "", "Queue " + name));
  if (queue === null) {
    section.append(make("p", "", "Redis does not answer."));
    return section;
  }
  const alive = queue.engines.filter((engine) => engine.alive);
  const sum = (field) => alive.reduce((total, engine) => total + (engine[field] || 0), 0);
  const rates = new Map(queue.engines.map((engine) => [engine.name, rate(engine)]));
  const tokens = alive.reduce((total, engine) => total + (rates.get(engine.name) || 0), 0);
  const tiles = make("div", "tiles");
  const facts = [
    ["running", number(sum("running"))],
    ["waiting in engines", number(sum("waiting"))],
    ["tokens/s", number(tokens, 1)],
    ["unfinished, high", number(queue.outstanding.high)],
    ["unfinished, normal", number(queue.outstanding.normal)],
    ["unfinished, batch", number(queue.outstanding.batch)],
    ["to be retried", number(queue.delayed)],
    ["completed", number(queue.counters.completed || 0)],
    ["failed", number((queue.counters.failed || 0) + (queue.counters.expired || 0))],
    ["cancelled", number(queue.counters.cancelled || 0)],
    ["refused", number(queue.counters.rejected || 0)],
    ["webhooks due", number(queue.hooks.due)],
    ["webhooks given up", number(queue.hooks.dead)],
    ["dead letters", number(queue.dead_letters)],
  ];
  for (const [label, value] of facts) {
    const tile = make("div", "tile");
    tile.append(make("b", "", value), label);
    tiles.append(tile);
  }
  section.append(tiles, make("h3", "", `Engines: ${alive.length} of ${queue.engines.length} alive`));
  for (const engine of queue.engines) section.append(showEngine(engine, rates.get(engine.name)));
  return section;
}

// Tokens a second since the last look at which the engine had told something new.
function rate(engine) {
  const now = performance.now() / 1000 - engine.age_s;
  const known = before.get(engine.name);
  if (typeof engine.output_tokens !== "number") return undefined;
  if (!known || engine.output_tokens < known.tokens) {
    before.set(engine.name, { at: now, tokens: engine.output_tokens, rate: undefined });
    return undefined;
  }
  if (now - known.at > 0.5) {
    known.rate = (engine.output_tokens - known.tokens) / (now - known.at);
    known.at = now;
    known.tokens = engine.output_tokens;
  }
  return known.rate;
}

function showEngine(engine, tokens) {
  const shown = make("article", engine.alive ? "engine" : "engine gone");
  shown.append(make("h3", "", engine.name));
  const used = engine.num_blocks - engine.free_blocks;
  const recomputed = engine.preemptions - engine.swap_preemptions;
  const lines = [
    [
      engine.model,
      `heartbeat ${number(engine.age_s, 1)} s ago`,
      `${number(engine.running)} running`,
      `${number(engine.waiting)} waiting`,
      `${number(tokens, 1)} tokens/s`,
    ],
    [
      `KV pool: ${number(used)} of ${number(engine.num_blocks)} blocks held (${share(used, engine.num_blocks)})`,
      `${number(engine.shared_blocks)} shared`,
      `${number(engine.cached_blocks)} free with content`,
      `waste ${number(engine.waste_percent, 1)} %`,
    ],
    [
      `prefix hits: ${number(engine.hit_tokens)} of ${number(engine.queried_tokens)} prompt tokens (${share(engine.hit_tokens, engine.queried_tokens)})`,
      `preemptions: ${number(engine.preemptions)}, of them ${number(engine.swap_preemptions)} swapped, ${number(recomputed)} recomputed`,
    ],
  ];
  for (const line of lines) {
    const facts = make("div", "facts");
    facts.append(...line.map((text) => make("span", "", text)));
    shown.append(facts);
  }
  const [held, known] = Array.isArray(engine.pool_map) ? engine.pool_map.map(String) : ["", ""];
  const map = make("div", "map");
  for (let place = 0; place < held.length; place++) {
    const cell = make("i");
    const shade = Number(held[place]) / 9;
    cell.style.background = `color-mix(in srgb, var(--held) ${Math.round(100 * shade)}%, transparent)`;
    if (Number(known[place]) > 0) cell.style.borderColor = "var(--known)";
    cell.title = `held ${held[place]}/9, content kept ${known[place]}/9`;
    map.append(cell);
  }
  const key = make("div", "key", "pool map, first to last block:");
  const blue = make("i");
  blue.style.background = "var(--held)";
  const green = make("i");
  green.style.border = "2px solid var(--known)";
  key.append(blue, "held", green, "holds content that can be shared");
  if (held) shown.append(map, key);
  return shown;
}

part("form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("pagemill.key", part("key").value);
  part("key").value = "";
  look();
});
look();
