// Submits an image and fetches its embedding rows in JavaScript, using only the .proto file.
//
//     npm install --prefix examples/node
//     node examples/node/fetch_rows.js photo.jpg [HOST:PORT]
//
// It fetches the rows in two windows, as two prefill chunks would, and verifies the checksum of each.

import {readFileSync} from "node:fs";
import {fileURLToPath} from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import {blake3, xxhash3} from "hash-wasm";

const PROTO = fileURLToPath(new URL("../../proto/encoder_contract/v1/encoder.proto", import.meta.url));
const [path, server = "127.0.0.1:50051"] = process.argv.slice(2);
const end = (why) => (console.error(why), process.exit(1));
process.on("uncaughtException", (error) => end(`${path}: ${error.message}`));
if (!path) end("usage: node examples/node/fetch_rows.js photo.jpg [HOST:PORT]");

const definition = protoLoader.loadSync(PROTO, {keepCase: true, longs: String, enums: String, defaults: true, oneofs: true});
const {EncoderService} = grpc.loadPackageDefinition(definition).encoder_contract.v1;
const client = new EncoderService(server, grpc.credentials.createInsecure(), {
  "grpc.max_receive_message_length": -1,
});

const caller = {request_id: "node example"};

function describe() {
  return new Promise((resolve, reject) =>
    client.Describe({}, (error, answer) => (error ? reject(error) : resolve(answer))));
}

// Name the image by the BLAKE3 hash of its file. A small file comes along; a large one is sent once the server asks for it.
function submit(file, digest, mostBytes) {
  return new Promise((resolve, reject) => {
    const call = client.Submit();
    let known;
    call.on("data", ({states}) => {
      for (const state of states) {
        if (state.state === "STATE_FAILED") reject(new Error(state.error.message));
        else if (state.state !== "STATE_NEEDS_BYTES") known = state;
        else for (let at = 0; at < file.length; at += mostBytes) {
          const data = file.subarray(at, at + mostBytes);
          call.write({bytes: [{index: 0, data, last: at + mostBytes >= file.length}]});
        }
      }
    });
    call.on("error", reject);
    call.on("end", () => resolve(known)); // the server ends the call with the last answer
    const bytes = file.length <= mostBytes ? [{index: 0, data: file, last: true}] : [];
    call.write({open: caller, names: {names: [{index: 0, digest, size_bytes: file.length}]}, bytes, last: true});
  });
}

// Fetch rows [begin, end), verify their checksum, and return their bytes.
async function fetchWindow(digest, begin, end) {
  const pieces = [];
  let ready;
  const call = client.Fetch({
    caller,
    images: [{index: 0, digest, row_begin: begin, row_end: end}],
    transports: ["TRANSPORT_INLINE"],
    grace_ms: 1000,
  });
  for await (const answer of call) {
    for (const error of answer.errors) throw new Error(error.message);
    for (const announced of answer.ready) ready = announced;
    if (answer.rows) pieces.push(answer.rows.data);
    if (ready && pieces.reduce((sum, piece) => sum + piece.length, 0) >= Number(ready.row_bytes)) break;
  }
  const rows = Buffer.concat(pieces);
  const found = BigInt("0x" + (await xxhash3(rows)));
  if (found !== BigInt(ready.checksum)) throw new Error(`checksum ${found}, not ${ready.checksum}`);
  return {ready, rows};
}

const file = readFileSync(path);
const digest = Buffer.from(await blake3(file), "hex");
const {model_name: model, limits} = await describe();
const {tokens} = await submit(file, digest, limits.max_message_bytes);
console.log(`${path}: ${tokens} tokens of ${model}`);
for (const [begin, end] of [[0, tokens >> 1], [tokens >> 1, tokens]]) {
  const {ready, rows} = await fetchWindow(digest, begin, end);
  const hash = await blake3(rows);
  console.log(`rows ${begin} to ${end}: ${end - begin} x ${ready.width} ${ready.dtype}, checksum right, blake3 ${hash}`);
}
client.close();
