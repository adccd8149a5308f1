// The Vercel AI SDK over its OpenAI, Anthropic and Google providers; SUITE_VARIANT says which.
// usage: node vercel.mjs NODE_MODULES

import assert from 'node:assert/strict';
import { appendFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const require = createRequire(pathToFileURL(process.argv[2] + '/suite.js'));
const load = name => import(pathToFileURL(require.resolve(name)));
const ai = await load('ai');
const { z } = await load('zod');
const { APICallError, Output, ToolLoopAgent, embed, generateObject, generateText, stepCountIs, streamObject } = ai;
const { streamText, tool } = ai;

const { SUITE_BASE_URL: base, SUITE_API_KEY: apiKey, SUITE_MODEL: name, SUITE_VARIANT: variant } = process.env;
globalThis.AI_SDK_LOG_WARNINGS = false;

const THINK = {
  'openai-chat': { openai: { reasoningEffort: 'medium', forceReasoning: true } },
  'openai-responses': { openai: { reasoningEffort: 'medium', reasoningSummary: 'auto', forceReasoning: true } },
  anthropic: { anthropic: { thinking: { type: 'enabled', budgetTokens: 1024 } } },
  google: { google: { thinkingConfig: { includeThoughts: true, thinkingBudget: 1024 } } },
}[variant];
const OFF = {
  'openai-chat': { openai: { reasoningEffort: 'none', forceReasoning: true } },
  'openai-responses': { openai: { reasoningEffort: 'none', forceReasoning: true } },
  anthropic: { anthropic: { thinking: { type: 'disabled' } } },
  google: { google: { thinkingConfig: { thinkingBudget: 0 } } },
}[variant];

async function provider(key) {
  if (variant === 'anthropic')
    return (await load('@ai-sdk/anthropic')).createAnthropic({ baseURL: `${base}/v1`, apiKey: key });
  if (variant === 'google')
    return (await load('@ai-sdk/google')).createGoogleGenerativeAI({ baseURL: `${base}/v1beta`, apiKey: key });
  return (await load('@ai-sdk/openai')).createOpenAI({ baseURL: `${base}/v1`, apiKey: key });
}
const own = await provider(apiKey);
const modelOf = given =>
  variant === 'openai-chat' ? given.chat(name) : variant === 'openai-responses' ? given.responses(name) : given(name);
const model = modelOf(own);
const chat = variant === 'openai-chat';
const responses = variant === 'openai-responses';

const calls = [];
const weather = tool({
  description: 'The weather at a place.',
  inputSchema: z.object({ location: z.string() }),
  execute: async ({ location }) => {
    calls.push(location);
    return `It is sunny in ${location}.`;
  },
});
const numbers = z.object({ a: z.number(), b: z.number() });
const add = tool({ description: 'Adds.', inputSchema: numbers, execute: async ({ a, b }) => a + b });
const multiply = tool({ description: 'Multiplies.', inputSchema: numbers, execute: async ({ a, b }) => a * b });
const tools = { get_weather: weather, add, multiply };
const recipe = z.object({ title: z.string(), minutes: z.number().int(), steps: z.array(z.string()), hot: z.boolean() });
const PNG =
  'iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFklEQVR4nGP8z8DAwMDAxMDAwMDAAAANHQEDasKb6QAAAABJRU5ErkJggg==';

const tests = [];
const test = (title, run) => tests.push([title, run]);

test('generateText', async () => {
  const result = await generateText({ model, prompt: 'Hello' });
  assert.match(result.text, /^Hello!/);
  assert.equal(result.finishReason, 'stop');
  assert.ok(result.usage.inputTokens > 0 && result.usage.outputTokens > 0);
  assert.equal(result.usage.totalTokens, result.usage.inputTokens + result.usage.outputTokens);
  assert.ok(result.response.id);
});

test('streamText', async () => {
  const result = streamText({ model, prompt: 'Count from 1 to 20.' });
  const chunks = [];
  for await (const chunk of result.textStream) chunks.push(chunk);
  assert.ok(chunks.length > 2, `${chunks.length} chunks`);
  assert.equal(chunks.join(''), Array.from({ length: 20 }, (_, n) => n + 1).join(', '));
  assert.equal(await result.finishReason, 'stop');
  const usage = await result.usage;
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 10);
});

test('a conversation with a system prompt', async () => {
  const messages = [
    { role: 'user', content: 'My name is Alice.' },
    { role: 'assistant', content: 'Hello Alice!' },
    { role: 'user', content: [{ type: 'text', text: 'What is my name?' }] },
  ];
  const result = await generateText({ model, system: 'Be brief.', messages });
  assert.equal(result.text, 'Your name is Alice.');
});

for (const [title, options] of [['', undefined], [' with thinking', THINK], [' without thinking', OFF]]) {
  test(`tools in several steps${title}`, async () => {
    calls.length = 0;
    const prompt = 'What is the weather in Paris?';
    const result = await generateText({ model, tools, prompt, stopWhen: stepCountIs(5), providerOptions: options });
    assert.deepEqual(calls, ['Paris']);
    assert.equal(result.steps.length, 2);
    assert.equal(result.steps[0].finishReason, 'tool-calls');
    assert.match(result.text, /It is sunny in Paris\./);
  });

  test(`streamed tools in several steps${title}`, async () => {
    calls.length = 0;
    const prompt = 'What is the weather in Oslo?';
    const result = streamText({ model, tools, prompt, stopWhen: stepCountIs(5), providerOptions: options });
    const seen = {};
    for await (const part of result.fullStream) {
      assert.notEqual(part.type, 'error', JSON.stringify(part));
      seen[part.type] = (seen[part.type] ?? 0) + 1;
    }
    assert.deepEqual(calls, ['Oslo']);
    assert.equal(seen['tool-call'], 1);
    assert.equal(seen['tool-result'], 1);
    assert.ok(seen['tool-input-delta'] >= 1);
    assert.ok(seen['text-delta'] > 1);
    assert.match(await result.text, /It is sunny in Oslo\./);
  });
}

test('two calls in one step', async () => {
  calls.length = 0;
  const prompt = 'What is the weather in Paris and Rome?';
  const result = await generateText({ model, tools, prompt, stopWhen: stepCountIs(5) });
  assert.deepEqual(calls.toSorted(), ['Paris', 'Rome']);
  assert.equal(result.steps.length, 2);
});

test('tools one after another', async () => {
  const prompt = 'Use add with 2 and 3, then use multiply with 4 and 5.';
  const result = await generateText({ model, tools, prompt, stopWhen: stepCountIs(6) });
  const order = result.steps.flatMap(step => step.toolCalls.map(call => call.toolName));
  assert.deepEqual(order, ['add', 'multiply']);
});

test('an agent loop', async () => {
  const agent = new ToolLoopAgent({ model, tools, stopWhen: stepCountIs(4) });
  const result = await agent.generate({ prompt: 'What is the weather in Lima?' });
  assert.match(result.text, /sunny in Lima/);
});

test('a tool that fails', async () => {
  const broken = tool({ inputSchema: z.object({}), execute: async () => { throw new Error('out of order'); } });
  const result = await generateText({ model, tools: { broken }, prompt: 'Use broken.', stopWhen: stepCountIs(3) });
  assert.equal(result.steps.length, 2);
  assert.match(result.text, /out of order/);
});

test('toolChoice required', async () => {
  const result = await generateText({ model, tools, prompt: 'Hello!', toolChoice: 'required' });
  assert.ok(result.toolCalls.length >= 1);
  assert.ok(!result.toolCalls[0].invalid);
});

test('toolChoice by name', async () => {
  const toolChoice = { type: 'tool', toolName: 'multiply' };
  const result = await generateText({ model, tools, prompt: 'What is the weather in Paris?', toolChoice });
  assert.deepEqual(result.toolCalls.map(call => call.toolName), ['multiply']);
});

test('toolChoice none', async () => {
  const result = await generateText({ model, tools, prompt: 'What is the weather in Paris?', toolChoice: 'none' });
  assert.equal(result.toolCalls.length, 0);
});

test('generateObject', async () => {
  const result = await generateObject({ model, schema: recipe, prompt: 'A recipe for soup in 20 minutes.' });
  recipe.parse(result.object);
  assert.equal(result.finishReason, 'stop');
});

test('generateObject with thinking', async () => {
  const prompt = 'A recipe for soup in 20 minutes.';
  const result = await generateObject({ model, schema: recipe, prompt, providerOptions: THINK });
  recipe.parse(result.object);
});

test('generateObject with an enumeration', async () => {
  const values = ['sunny', 'rainy'];
  const result = await generateObject({ model, output: 'enum', enum: values, prompt: 'It is a rainy day.' });
  assert.ok(values.includes(result.object));
});

test('generateObject with an array', async () => {
  const schema = z.object({ name: z.string() });
  const result = await generateObject({ model, output: 'array', schema, prompt: 'Two heroes.' });
  assert.ok(Array.isArray(result.object) && result.object.every(one => typeof one.name === 'string'));
});

test('streamObject', async () => {
  // Without this option the SDK asks Anthropic for a tool call, and the gateway sends a call's input in one piece.
  const providerOptions = { anthropic: { structuredOutputMode: 'outputFormat' } };
  const result = streamObject({ model, schema: recipe, prompt: 'A recipe for soup in 20 minutes.', providerOptions });
  let partial = 0;
  for await (const part of result.partialObjectStream) partial += part !== undefined;
  assert.ok(partial > 1, `${partial} partial objects`);
  recipe.parse(await result.object);
});

test('streamObject as the provider does it', async () => {
  const result = streamObject({ model, schema: recipe, prompt: 'A recipe for soup in 20 minutes.' });
  for await (const _ of result.partialObjectStream);
  recipe.parse(await result.object);
});

test('Output.object', async () => {
  const output = Output.object({ schema: recipe });
  const result = await generateText({ model, prompt: 'A recipe for soup in 20 minutes.', output });
  recipe.parse(result.output);
});

test('Output.object, streamed', async () => {
  const output = Output.object({ schema: recipe });
  const result = streamText({ model, prompt: 'A recipe for soup in 20 minutes.', output });
  for await (const _ of result.partialOutputStream);
  recipe.parse(await result.output);
});

test('Output.choice', async () => {
  const output = Output.choice({ options: ['yes', 'no'] });
  const result = await generateText({ model, prompt: 'Is it no?', output });
  assert.ok(['yes', 'no'].includes(result.output));
});

test('an image', async () => {
  const content = [
    { type: 'text', text: 'Hello' },
    { type: 'image', image: Buffer.from(PNG, 'base64'), mediaType: 'image/png' },
  ];
  const result = await generateText({ model, messages: [{ role: 'user', content }] });
  assert.ok(result.text.length > 10);
});

test('reasoning that is asked for', async () => {
  const result = await generateText({ model, prompt: 'What is 3 + 4?', providerOptions: THINK });
  assert.equal(result.text, '3 + 4 = 7');
  if (!chat) assert.match(result.reasoningText ?? '', /by the rules/); // Chat Completions has no place for it
  assert.ok(result.usage.outputTokenDetails.reasoningTokens > 0 || variant === 'anthropic');
});

test('reasoning that is asked for, streamed', async () => {
  const result = streamText({ model, prompt: 'What is 3 + 4?', providerOptions: THINK });
  let thought = '';
  for await (const part of result.fullStream) {
    assert.notEqual(part.type, 'error', JSON.stringify(part));
    if (part.type === 'reasoning-delta') thought += part.text;
  }
  assert.equal(await result.text, '3 + 4 = 7');
  if (!chat) assert.match(thought, /by the rules/);
});

for (const [title, options] of [['not asked for', undefined], ['turned off', OFF]]) {
  test(`reasoning that is ${title}`, async () => {
    const result = await generateText({ model, prompt: 'What is 3 + 4?', providerOptions: options });
    assert.equal(result.text, '3 + 4 = 7');
    assert.ok(!result.reasoningText, result.reasoningText);
    const streamed = streamText({ model, prompt: 'What is 3 + 4?', providerOptions: options });
    assert.equal((await streamed.reasoningText) || '', '');
    assert.equal(await streamed.text, '3 + 4 = 7');
  });
}

test('reasoning that is turned off costs no tokens', async () => {
  const result = await generateText({ model, prompt: 'What is 3 + 4?', providerOptions: OFF });
  assert.ok(!result.usage.outputTokenDetails.reasoningTokens, JSON.stringify(result.usage));
  assert.ok(result.usage.outputTokens < 20, JSON.stringify(result.usage));
});

test('a conversation that goes on after reasoning', async () => {
  const messages = [{ role: 'user', content: 'My name is Ada. What is 3 + 4?' }];
  const first = await generateText({ model, messages, providerOptions: THINK });
  messages.push(...first.response.messages, { role: 'user', content: 'What is my name?' });
  const second = await generateText({ model, messages, providerOptions: THINK });
  assert.equal(second.text, 'Your name is Ada.');
});

if (!responses) // its API has no stop strings
  test('stop strings', async () => {
    const result = await generateText({ model, prompt: 'Count from 1 to 20.', stopSequences: ['5'] });
    assert.equal(result.text.trim(), '1, 2, 3, 4,');
    assert.equal(result.finishReason, 'stop');
  });

test('the most tokens', async () => {
  const result = await generateText({ model, prompt: 'Count from 1 to 99.', maxOutputTokens: 60, providerOptions: OFF });
  assert.equal(result.finishReason, 'length');
  assert.ok(result.usage.outputTokens <= 60);
});

test('sampling settings', async () => {
  const result = await generateText({ model, prompt: 'Hello', temperature: 0.5, maxRetries: 0 });
  assert.ok(result.text);
});

test('an answer that is abandoned', async () => {
  const controller = new AbortController();
  const result = streamText({ model, prompt: 'Count from 1 to 400.', abortSignal: controller.signal });
  let aborted = false;
  try {
    for await (const part of result.fullStream) {
      if (part.type === 'text-delta') controller.abort();
      aborted ||= part.type === 'abort';
    }
  } catch (error) {
    aborted = error.name === 'AbortError';
  }
  assert.ok(aborted);
  assert.match((await generateText({ model, prompt: 'Hello' })).text, /^Hello!/);
});

test('a wrong key', async () => {
  const stranger = modelOf(await provider('wrong'));
  const error = await generateText({ model: stranger, prompt: 'Hello', maxRetries: 0 }).catch(error => error);
  assert.ok(APICallError.isInstance(error), String(error));
  assert.equal(error.statusCode, 401);
  assert.equal(error.isRetryable, false);
  assert.ok(error.message.length > 5 && !error.message.startsWith('{'), error.message);
});

test('a prompt that is too long', async () => {
  const error = await generateText({ model, prompt: 'word '.repeat(40_000), maxRetries: 0 }).catch(error => error);
  assert.ok(APICallError.isInstance(error), String(error));
  assert.equal(error.statusCode, 400);
});

if (variant !== 'anthropic') // it has no embeddings
  test('embeddings are refused', async () => {
    const embedding = own.embeddingModel('m');
    const error = await embed({ model: embedding, value: 'Hello', maxRetries: 0 }).catch(error => error);
    assert.ok(APICallError.isInstance(error), String(error));
    assert.equal(error.statusCode, 404);
  });

if (chat || responses)
  test('log-probabilities', async () => {
    const providerOptions = { openai: { logprobs: 2 } };
    const result = await generateText({ model, prompt: 'Hello', providerOptions });
    const told = result.providerMetadata.openai.logprobs.flat();
    assert.ok(told.length > 3);
    assert.ok(told.every(one => typeof one.logprob === 'number' && one.top_logprobs.length === 2));
  });

for (const [title, run] of tests) {
  const row = { test: title, outcome: 'passed' };
  try {
    let timer;
    const late = new Promise((_, reject) => { timer = setTimeout(() => reject(new Error('no end after 60 s')), 60_000); });
    await Promise.race([run(), late]);
    clearTimeout(timer);
  } catch (error) {
    row.outcome = 'failed';
    row.detail = `${error?.name}: ${error?.message} ${error?.responseBody ?? ''} ${error?.cause?.message ?? ''}`;
    row.detail = row.detail.replace(/\s+/g, ' ').slice(0, 400);
  }
  appendFileSync(process.env.AFIELD_SUITE_RESULTS, JSON.stringify(row) + '\n');
}
appendFileSync(process.env.AFIELD_SUITE_RESULTS, JSON.stringify({ finished: true }) + '\n');
process.exit(0);
