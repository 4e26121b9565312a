// What a program does with the `openai` package of npm: node openai_session.mjs URL MODEL KEY, one line of JSON.
import OpenAI from "openai";

const [url, model, apiKey] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey, maxRetries: 0, timeout: 30_000 };
const client = new OpenAI(options);
const messages = [{ role: "user", content: "def main(argv):" }];
const body = { model, messages, max_tokens: 24, temperature: 0 };
const told = { models: [] };

for await (const one of client.models.list()) told.models.push(one.id);

const answer = await client.chat.completions.create(body);
told.content = answer.choices[0].message.content;
told.usage = answer.usage;

told.streamed = "";
const stream = await client.chat.completions.create({ ...body, stream: true });
for await (const chunk of stream) told.streamed += chunk.choices[0].delta.content ?? "";

told.helper = await client.chat.completions.stream(body).finalContent();

try {
  await client.chat.completions.create({ ...body, temprature: 1 });
} catch (error) {
  if (!(error instanceof OpenAI.BadRequestError)) throw error;
  told.refused = { status: error.status, param: error.param };
}

try {
  await new OpenAI({ ...options, apiKey: "wrong" }).models.list();
} catch (error) {
  if (!(error instanceof OpenAI.AuthenticationError)) throw error;
  told.unauthorised = error.status;
}

told.aborted = 0;
const long = await client.chat.completions.create({ ...body, max_tokens: 400, ignore_eos: true, stream: true });
for await (const chunk of long) {
  if (++told.aborted === 3) break; // which aborts the request
}

told.after = (await client.chat.completions.create(body)).choices[0].message.content;
console.log(JSON.stringify(told));
