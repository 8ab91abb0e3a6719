// Speaks to the engine, worker.js: one worker, made by the first click; one text at a time.
// One sentence for each error, where the engine gives none of its own.
const WRONG = {
  "no-simd": "This browser can't run WebAssembly with SIMD, which the engine needs: take a current Chrome, Edge, Firefox or Safari.",
  memory: "There is too little memory for the model, which takes about half a gigabyte: close other tabs, and press the button again.",
  "wrong-file": "That file isn't the model that this page runs: choose SmolLM2-135M-Instruct.Q4_1.gguf, as the package fetches it.",
  truncated: "The file is cut short: fetch it again, or choose a whole copy.",
  network: "The model could not be fetched: see whether you are online and this site has its weights, then press the button again, or choose a file.",
  "bad-input": "One of the settings can't be used: look at the prompt, K, the temperature and the seed.",
  cancelled: "Cancelled.",
};
const OFFLINE = "The connection is down: go online, and press the button again. What has arrived is kept.";
const BROKEN = "The engine, live/worker.js, could not be started, or it broke: reload the page, and press the button again.";

export const failure = (code, message) => Object.assign(new Error(message || WRONG[code] || String(code)), { code });

export const engineAt = (address) => {
  let worker = null, loading = null, count = 0, line = Promise.resolve();
  const calls = new Map();
  const settle = (error, info) => { // what loads
    const { resolve, reject } = loading || {};
    loading = null;
    if (error) reject?.(error); else resolve?.(info);
  };
  const heard = ({ data }) => {
    const call = calls.get(data.id);
    if (data.type === "progress") (loading || [...calls.values()][0])?.progress?.(data);
    if (data.type === "round") call?.round?.(data.round);
    if (data.type === "ready") settle(null, data.info);
    if (data.type === "done" && calls.delete(data.id)) call.resolve(data.result);
    if (data.type === "error" && calls.delete(data.id)) call.reject(failure(data.code, data.message));
    else if (data.type === "error") settle(failure(data.code, data.message));
  };
  const send = (message) => worker?.postMessage(message);
  const broke = () => { // the next click makes another
    const error = failure("network", navigator.onLine ? BROKEN : OFFLINE), all = [...calls.values()];
    worker.terminate();
    worker = null;
    calls.clear();
    settle(error);
    for (const call of all) call.reject(error);
  };
  const open = () => {
    if (worker) return;
    worker = new Worker(address);
    worker.addEventListener("message", heard);
    worker.addEventListener("error", broke);
  };
  const load = (message, progress) => new Promise((resolve, reject) => {
    if (typeof Worker !== "function" || typeof WebAssembly !== "object") return reject(failure("no-simd"));
    loading = { resolve, reject, progress };
    open();
    send({ type: "load", ...message });
  });
  const generate = (options, { round, progress, began } = {}) => {
    const call = () => new Promise((resolve, reject) => {
      if (!worker) return reject(failure("network", BROKEN));
      const id = (count += 1);
      calls.set(id, { resolve, reject, round, progress });
      began?.(id);
      send({ type: "generate", id, options });
    });
    line = line.then(call, call); // those from the console wait their turn
    return line;
  };
  return { load, generate, send };
};

// A head that lies in several safetensors files, as the package has it, becomes one: a header, then all numbers.
export const joined = async (files) => {
  if (files.length < 2) return files[0];
  const header = {}, bodies = [];
  let offset = 0;
  for (const file of [...files].sort((a, b) => (a.name < b.name ? -1 : 1))) {
    try {
      const size = Number(new DataView(await file.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
      for (const [name, tensor] of Object.entries(JSON.parse(await file.slice(8, 8 + size).text()))) {
        if (name !== "__metadata__") header[name] = { ...tensor, data_offsets: tensor.data_offsets.map((at) => at + offset) };
      }
      bodies.push(file.slice(8 + size));
      offset += file.size - 8 - size;
    } catch { throw failure("wrong-file", `${file.name} is no safetensors file: choose the GGUF, and the head’s safetensors if you like.`); }
  }
  const words = new TextEncoder().encode(JSON.stringify(header)), length = new DataView(new ArrayBuffer(8));
  length.setBigUint64(0, BigInt(words.length), true);
  return new File([length.buffer, words, ...bodies], "head.safetensors");
};
