// The stock npm clients against a node: node stock_clients.mjs URL. Ends with status 0 if all as expected.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { Ollama } from "ollama";

const [url] = process.argv.slice(2);
const model = "smollm2:135m";
const messages = [{ role: "user", content: "What is the capital of France?" }];
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const local = new Ollama({ host: url });

const whole = await client.chat.completions.create({ model, messages, max_tokens: 32 });
assert.match(whole.choices[0].message.content, /Paris/);

const stream = client.chat.completions.stream({ model, messages, max_tokens: 32, stream_options: { include_usage: true } });
const streamed = await stream.finalChatCompletion();
assert.equal(streamed.choices[0].message.content, whole.choices[0].message.content);
assert.deepEqual(streamed.usage, whole.usage);

const vectors = await client.embeddings.create({ model: "all-minilm", input: ["a text", "another"] });
assert.deepEqual(vectors.data.map((item) => item.embedding.length), [384, 384]);

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const called = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", max_tokens: 100 });
assert.equal(called.choices[0].finish_reason, "tool_calls");
assert.equal(typeof JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city, "string");

await assert.rejects(client.models.retrieve("no-such-model"), (error) => error.status === 404 && error.code === "model_not_found");
const ids = [];
for await (const entry of client.models.list()) ids.push(entry.id);
assert.ok(ids.includes("smollm2-135m-instruct"));

const answer = await local.chat({ model, messages, options: { num_predict: 32 } });
assert.equal(answer.message.content, whole.choices[0].message.content);
let text = "";
for await (const part of await local.chat({ model, messages, stream: true, options: { num_predict: 32 } })) text += part.message.content;
assert.equal(text, answer.message.content);
const embedded = await local.embed({ model: "all-minilm", input: "a text" });
assert.equal(embedded.embeddings[0].length, 384);
assert.ok((await local.list()).models.length >= 2);
await assert.rejects(local.show({ model: "no-such-model" }), /not found/);

const cut = await local.generate({ model, prompt: "Count to a thousand.", stream: true, options: { num_predict: 4000 } });
for await (const part of cut) { assert.equal(part.done, false); cut.abort(); break; }
console.log("all as expected");
