// Pull, load, answer and remove through the stock client: node pulled_model.mjs NODE_URL NAME ID
import assert from "node:assert";
import { Ollama } from "ollama";

const [url, name, id] = process.argv.slice(2);
const client = new Ollama({ host: url });

const states = [];
for await (const state of await client.pull({ model: name, stream: true })) states.push(state);
assert.equal(states.at(-1).status, "success");
assert.ok(states.some((state) => state.total > 0));
assert.deepEqual((await client.list()).models.map((model) => model.model), [`${id}:latest`]);
const { embeddings } = await client.embed({ model: name, input: "a cat" });
assert.equal(embeddings[0].length, 32);
assert.deepEqual((await client.ps()).models.map((model) => model.model), [`${id}:latest`]);
await client.delete({ model: name });
assert.deepEqual((await client.list()).models, []);
await assert.rejects(client.embed({ model: name, input: "a cat" }), /not found|not installed/);
console.log("all is as it should be");
