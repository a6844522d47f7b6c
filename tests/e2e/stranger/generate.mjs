// Calls a manager with nothing of ours but the proto files, and prints what it got as one JSON object.
//
// node generate.mjs ADDRESS PROTO_ROOT REQUESTS, where REQUESTS is a JSON list of GenerateRequest messages.
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [address, protoRoot, requestsJson] = process.argv.slice(2);
const requests = JSON.parse(requestsJson);
const definition = protoLoader.loadSync("kvplane/kvmanager/v1/inference_service.proto", {
  includeDirs: [protoRoot],
  keepCase: true,
  longs: String,
  enums: String,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).kvplane.kvmanager.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure());

function ended(stream, onData) {
  return new Promise((resolve, reject) => {
    stream.on("data", onData);
    stream.on("error", reject);
    stream.on("end", resolve);
  });
}

async function generate(request) {
  const output = { token_ids: [], text: "", finish_reason: null, messages: 0 };
  await ended(client.Generate(request), (response) => {
    output.messages += 1;
    output.token_ids.push(...(response.token_ids ?? []));
    output.text += response.text ?? "";
    output.finish_reason = response.finish_reason ?? output.finish_reason;
    output.usage = response.usage ?? output.usage;
  });
  return output;
}

async function generateMany() {
  const tokens = Object.fromEntries(requests.map((request) => [request.request_id, []]));
  const errors = {};
  const stream = client.GenerateMany();
  const end = ended(stream, (response) => {
    for (const output of response.outputs ?? []) tokens[output.request_id].push(...(output.token_ids ?? []));
    for (const { request_id, error } of response.errors ?? []) errors[request_id] = error.reason;
  });
  for (const request of requests) stream.write({ generate: request });
  stream.write({ generate: { request_id: "bad", token_ids: { ids: [] } } });
  stream.end();
  await end;
  return { tokens, errors };
}

async function refusal() {
  try {
    await generate({ token_ids: { ids: [] } });
  } catch (error) {
    return { code: grpc.status[error.code], details: error.details };
  }
  return null;
}

const model = await new Promise((resolve, reject) =>
  client.GetModel({}, (error, response) => (error ? reject(error) : resolve(response))),
);
const streamed = await Promise.all(requests.map((request, index) => generate({ ...request, request_id: `own-${index}` })));
console.log(JSON.stringify({ model, streamed, many: await generateMany(), refusal: await refusal() }));
client.close();
