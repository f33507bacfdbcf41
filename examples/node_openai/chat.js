// OpenAI's own client against a gateway: a chat as it comes, a call of a tool, a response that goes on from another,
// and an answer that is not wanted any more.
//
//   pagemill serve                                  # prints the address
//   npm ci && node chat.js http://127.0.0.1:8000/v1
import OpenAI from "openai";

const baseURL = process.argv[2] ?? "http://127.0.0.1:8000/v1";
const client = new OpenAI({ baseURL, apiKey: process.env.PAGEMILL_API_KEY ?? "none" });
const model = (await client.models.list()).data[0].id;

async function chat() {
  const stream = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: "What is a page table?" }],
    max_tokens: 24,
    temperature: 0,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  return { text, tokens: usage.completion_tokens };
}

async function tool() {
  const parameters = {
    type: "object",
    properties: { a: { type: "integer" }, b: { type: "integer" } },
    required: ["a", "b"],
    additionalProperties: false,
  };
  const answer = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: "What is 3 + 4?" }],
    tools: [{ type: "function", function: { name: "add", parameters } }],
    tool_choice: "required",
    parallel_tool_calls: false,
    max_tokens: 60,
    temperature: 0,
  });
  const [call] = answer.choices[0].message.tool_calls;
  return { name: call.function.name, arguments: JSON.parse(call.function.arguments), end: answer.choices[0].finish_reason };
}

async function responses() {
  const first = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 8, temperature: 0 });
  const then = await client.responses.create({
    model,
    input: "Again.",
    previous_response_id: first.id,
    max_output_tokens: 8,
    temperature: 0,
  });
  return { first: first.output_text, then: then.output_text, previous: then.previous_response_id === first.id };
}

async function abort() {
  const stream = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 400, stream: true });
  let chunks = 0;
  for await (const chunk of stream) {
    if (chunk.choices[0].text) chunks += 1;
    if (chunks === 3) stream.controller.abort(); // closes the connection, and with it the generation ends
  }
  return { chunks };
}

const told = { chat: await chat(), tool: await tool(), responses: await responses(), abort: await abort() };
console.log(JSON.stringify(told, null, 2));
