// node ask.mjs OPEN_URL KEYED_URL KEY: asks two servers through the JavaScript client and prints what it made of them.
import { APIError, TypeSafeClient, choice, noul, score } from "@typesafe-ai/sdk";

const [openURL, keyedURL, key] = process.argv.slice(2);
const retry = { maxRetries: 0 };
const open = new TypeSafeClient({ baseURL: `${openURL}/`, apiKey: "unused", retry });
const keyed = new TypeSafeClient({ baseURL: keyedURL, apiKey: key, retry });
const stranger = new TypeSafeClient({ baseURL: keyedURL, apiKey: "another", retry });

const questions = {
  late: noul("Is it late?"),
  described: noul(undefined, { true: "after nine", false: "before" }),
  which: choice("Which?", { 북: "north", "the south": null, "🧭": { way: ["none"] } }),
  badly: score("How badly?", ["not", "somewhat", { very: true }]),
};
const ask = (client, state, asked = questions) => client.systemOne({ state, questions: asked });

// The name of the class that a refused call throws, with what it tells.
async function refusal(call) {
  try {
    await call();
  } catch (error) {
    if (error instanceof APIError) {
      return { name: error.constructor.name, status: error.status, message: error.message, requestId: error.requestId };
    }
    throw error;
  }
  throw new Error("the call was answered");
}

const { data, response, requestId } = await ask(open, { note: "The boat came at ten. 배" }).withResponse();
const report = {
  models: await open.models.list(),
  status: response.status,
  requestId,
  result: data,
  long: (await ask(open, "The boat came at ten. ".repeat(500))).usage,
  sparse: (await ask(open, [1, null, NaN])).usage,
  keyed: (await ask(keyed, "The boat came at ten.")).usage,
  refused: {
    missing: await refusal(() => ask(open, null)),
    typed: await refusal(() => ask(open, "s", { q: { type: "boolean" } })),
    stranger: await refusal(() => ask(stranger, "s")),
    strangerModels: await refusal(() => stranger.models.list()),
    nowhere: await refusal(() => ask(new TypeSafeClient({ baseURL: `${openURL}/v1`, apiKey: "unused", retry }), "s")),
  },
};
console.log(JSON.stringify(report));
