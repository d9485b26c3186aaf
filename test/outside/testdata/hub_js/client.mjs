// Calls @huggingface/hub as an application would. Arguments: name of a call, its arguments as JSON ({hubUrl, repo, ...}).
//
// Prints one JSON object: {"ok": value} or {"error": class, "message", "status"}.
import { createHash } from "node:crypto";
import * as hub from "@huggingface/hub";

console.log = console.info = console.debug = console.error; // the library tells its progress there

async function digest(blob) {
  if (blob === null) return null;
  const bytes = Buffer.from(await blob.arrayBuffer());
  return { size: bytes.length, sha256: createHash("sha256").update(bytes).digest("hex") };
}

const calls = {
  modelInfo: async (args) => (await hub.modelInfo(args)).name,
  listFiles: async (args) => {
    const out = {};
    for await (const f of hub.listFiles({ ...args, recursive: true })) {
      if (f.type === "file") out[f.path] = { size: f.size, sha256: f.lfs?.oid ?? null };
    }
    return out;
  },
  fileExists: (args) => hub.fileExists(args),
  fileDownloadInfo: (args) => hub.fileDownloadInfo(args),
  downloadFile: async (args) => digest(await hub.downloadFile(args)),
  slice: async ({ from, to, ...args }) => digest((await hub.downloadFile(args)).slice(from, to)),
  snapshotDownload: (args) => hub.snapshotDownload(args),
  parseSafetensorsMetadata: async (args) => {
    const m = await hub.parseSafetensorsMetadata({ ...args, computeParametersCount: true });
    return { sharded: m.sharded, parameters: m.parameterCount };
  },
  // What one session of an application asks, in one process.
  all: async (args) => {
    const out = {};
    out.modelInfo = await calls.modelInfo(args);
    out.files = Object.keys(await calls.listFiles(args)).length;
    out.exists = await calls.fileExists({ ...args, path: "config.json" });
    out.missing = await calls.fileExists({ ...args, path: "nope" });
    out.info = await calls.fileDownloadInfo({ ...args, path: "model.safetensors.index.json" });
    out.config = await calls.downloadFile({ ...args, path: "config.json" });
    out.slice = await calls.slice({ ...args, path: "config.json", from: 8, to: 100 });
    out.metadata = await calls.parseSafetensorsMetadata(args);
    out.snapshot = await calls.snapshotDownload(args);
    return out;
  },
};

let out;
try {
  out = { ok: await calls[process.argv[2]](JSON.parse(process.argv[3])) };
} catch (e) {
  out = { error: e.constructor.name, message: String(e.message), status: e.statusCode ?? null };
}
process.stdout.write(JSON.stringify(out) + "\n");
