// The AI SDK: chat and responses models of its OpenAI provider, its OpenAI-compatible provider; tools, objects, streams.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { NoObjectGeneratedError, embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert";
import { z } from "zod";

const url = process.env.NODE_URL;
const name = process.env.NODE_MODEL ?? "smollm2";
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });
const compatible = createOpenAICompatible({
  name: "node", baseURL: `${url}/v1`, supportsStructuredOutputs: true, includeUsage: true,
});

const Recipe = z.object({
  name: z.string().max(20),
  steps: z.array(z.object({ text: z.string().max(20), minutes: z.number().int().min(1).max(99) })).min(1).max(2),
});
const weather = tool({
  description: "The weather of a place.",
  inputSchema: z.object({ place: z.object({ city: z.string() }), days: z.number().int().optional() }),
  execute: async () => "sunny",
});

for (const model of [openai.chat(name), openai.responses(name), compatible.chatModel(name)]) {
  const common = { model, maxOutputTokens: 120, temperature: 0, maxRetries: 0 };
  assert((await generateText({ ...common, prompt: "What is the capital of France?" })).text);
  let text = "";
  const streamed = streamText({ ...common, prompt: "Count to three.", onError: ({ error }) => { throw error; } });
  for await (const piece of streamed.textStream) text += piece;
  assert(text);
  assert((await streamed.usage).outputTokens > 0);
  // A second turn with what the first one left, as agents do.
  const first = await generateText({ ...common, prompt: "How is the weather in Rome?", tools: { weather },
    toolChoice: "required" });
  assert(first.toolCalls.length || first.finishReason === "length");
  const messages = [{ role: "user", content: "How is the weather in Rome?" }, ...first.response.messages];
  if (first.finishReason !== "length") {
    await generateText({ ...common, messages: [...messages, { role: "user", content: "And in Paris?" }],
      tools: { weather }, stopWhen: stepCountIs(2) });
  }
  try {
    assert((await generateObject({ ...common, maxOutputTokens: 200, schema: Recipe, prompt: "A recipe for tea." })).object.name);
  } catch (error) {
    if (!NoObjectGeneratedError.isInstance(error)) throw error; // cut off by its length
  }
}
const { embeddings } = await embedMany({ model: openai.embedding("all-minilm"), values: ["a text", "another"] });
assert.equal(embeddings.length, 2);
console.log("all as expected");
