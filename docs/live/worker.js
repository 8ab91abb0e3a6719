// The engine of the live page: reads the default model's GGUF file, tokenizes, decodes. It runs in a worker, so that the
// page never waits; the arithmetic is kernel.wasm's. The rule is the package's for drafts that are certain
// (`sample_and_match`): at each place the target chooses its own token, as it would without a draft, and a draft token is
// kept if it is the same. So drafts never change a text. Held to Python, number by number, by tests/test_live_engine.py.
"use strict";
importScripts("sampling.js", "tokenizer.js", "files.js", "pace.js");

const MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf", MODEL_BYTES = 98362432;
const MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const CACHE = "specdec-live-"; // and the digest: what the browser keeps
const CAPACITY = 2048;  // positions that the caches have room for
const ROWS = 16;        // of a forward, at most
const LONGEST = 3;      // tokens in the longest ending that lookup looks for
const SHOWN = 8;        // tokens of a distribution that a round names

class Failure extends Error {
  constructor(code, message) { super(message); this.code = code; }
}

// ---- The model ------------------------------------------------------------------------------------------------------

// The memory that the kernel computes in: everything gets a place in it once.
class Arena {
  constructor(memory, start) { this.memory = memory; this.end = this.start = (start + 63) & ~63; }
  take(bytes) {
    const at = this.end;
    this.end = (at + bytes + 63) & ~63;
    const missing = Math.ceil((this.end - this.memory.buffer.byteLength) / 65536);
    if (missing > 0) {
      try { this.memory.grow(missing); } catch {
        throw new Failure("memory", "There is too little memory: the page needs about 250 MB for the model. Close other pages and try again.");
      }
    }
    return at;
  }
  floats(count) { return this.take(4 * count); }
  read(at, count) { return new Float32Array(this.memory.buffer, at, count); }
}

class Layers {
  // Buffers for ROWS rows, and cosines and sines for all positions. `apart`: how far apart the two of a pair lie.
  constructor(kernel, arena, sizes, apart, depth) {
    const { hidden, inner, heads, kvHeads, theta } = sizes, rows = (n) => arena.floats(ROWS * n);
    Object.assign(this, sizes, { sizes, kernel, arena, apart, kv: kvHeads * 64, length: 0 });
    [this.x, this.h, this.y] = [hidden, 3 * hidden, Math.max(hidden, heads * 64)].map(rows);
    [this.q, this.gate, this.up] = [heads * 64, inner, inner].map(rows);
    this.arranged = arena.floats(ROWS * inner);
    this.sums = arena.floats(ROWS * inner / 8);
    this.scores = arena.floats(CAPACITY);
    [this.keys, this.values] = [0, 0].map(() => arena.floats(depth * CAPACITY * this.kv));
    [this.cos, this.sin] = [Math.cos, Math.sin].map((turn) => {
      const at = arena.floats(CAPACITY * 32), table = arena.read(at, CAPACITY * 32);
      for (let i = 0; i < table.length; i++) {
        const frequency = Math.fround(1 / Math.fround(theta ** ((i % 32) / 32)));
        table[i] = turn(Math.fround((i >> 5) * frequency));
      }
      return at;
    });
  }

  // n rows of x in the order of the blocks that they will be multiplied by
  arrange(x, n, size) { this.kernel.arrange(x, n * size / 32, this.arranged, this.sums); }

  // y = weight x, for n rows that were arranged; with weights that lie in plain order, as they are
  product(weight, x, n, y) {
    const { kernel, sums, arranged } = this, [out, inputs] = weight.shape;
    if (weight.kind === BF16) kernel.bf16(weight.at, inputs, out, x, sums, n, y);
    else kernel[weight.kind === Q4_1 ? "q4_1" : "q8_0"](weight.at, inputs, out, arranged, sums, n, y);
  }

  // One layer over n rows: `this.h` holds what goes into attention. Keys and values are written behind those that are
  // there, so that taking positions back is a smaller `length`.
  layer(i, weights, n) {
    const { kernel, x, h, y, q, gate, up, hidden, inner, heads, kvHeads, kv, eps, length } = this;
    const place = 4 * i * CAPACITY * kv, new_ = place + 4 * length * kv, angle = 4 * 32 * length;
    this.arrange(h, n, hidden);
    this.product(weights.q, h, n, q);
    this.product(weights.k, h, n, this.keys + new_);
    this.product(weights.v, h, n, this.values + new_);
    kernel.rotate(q, heads, 64, this.apart, this.cos + angle, this.sin + angle, n);
    kernel.rotate(this.keys + new_, kvHeads, 64, this.apart, this.cos + angle, this.sin + angle, n);
    kernel.attend(q, this.keys + place, this.values + place, heads, kvHeads, length, n, this.scores, y);
    this.arrange(y, n, heads * 64);
    this.product(weights.out, y, n, h);
    kernel.plus(x, h, n * hidden);
    kernel.norm(x, weights.mlpNorm, hidden, eps, n, h, hidden);
    this.arrange(h, n, hidden);
    this.product(weights.gate, h, n, gate);
    this.product(weights.up, h, n, up);
    kernel.gated(gate, up, n * inner);
    this.arrange(gate, n, inner);
    this.product(weights.down, gate, n, h);
    kernel.plus(x, h, n * hidden);
  }

  rollback(length) { this.length = length; }
}

class Model extends Layers {
  constructor(kernel, arena, { says, tensors }) {
    const of = (name) => says[`llama.${name}`];
    const sizes = { hidden: of("embedding_length"), inner: of("feed_forward_length"), heads: of("attention.head_count"),
      kvHeads: of("attention.head_count_kv"), eps: of("attention.layer_norm_rms_epsilon"), theta: of("rope.freq_base") };
    super(kernel, arena, sizes, 1, of("block_count"));
    const tensor = (name) => tensors[`${name}.weight`];
    this.layers = Array.from({ length: of("block_count") }, (_, i) => {
      const of = (name) => tensor(`blk.${i}.${name}`);
      return { norm: of("attn_norm").at, q: of("attn_q"), k: of("attn_k"), v: of("attn_v"), out: of("attn_output"),
        mlpNorm: of("ffn_norm").at, gate: of("ffn_gate"), up: of("ffn_up"), down: of("ffn_down") };
    });
    this.vocabulary = tensor("token_embd");
    this.norm = tensor("output_norm").at;
    this.vocab = this.vocabulary.shape[0];
    this.logits = arena.floats(ROWS * this.vocab);
    this.features = arena.floats(CAPACITY * FEATURES.length * this.hidden); // of the positions up to `length`
  }

  embed(id, to) { this.kernel.embed(this.vocabulary.at + id * this.hidden / 32 * 34, this.hidden, to); }

  // The forward: n tokens behind those that were read, at most ROWS of them. The logits after each of them from row `from`
  // on, as rows of this.logits; what a head reads of each, in this.features.
  forward(ids, from = 0) {
    const { kernel, arena, x, h, hidden, eps, length } = this, n = ids.length, wide = FEATURES.length * hidden;
    ids.forEach((id, r) => this.embed(id, x + 4 * r * hidden));
    this.layers.forEach((weights, i) => {
      const kept = FEATURES.indexOf(i);
      if (kept >= 0) {
        const state = arena.read(x, n * hidden), all = arena.read(this.features, CAPACITY * wide);
        for (let r = 0; r < n; r++) all.set(state.subarray(r * hidden, (r + 1) * hidden), (length + r) * wide + kept * hidden);
      }
      kernel.norm(x, weights.norm, hidden, eps, n, h, hidden);
      this.layer(i, weights, n);
    });
    kernel.norm(x, this.norm, hidden, eps, n, h, hidden);
    this.arrange(h + 4 * from * hidden, n - from, hidden);
    this.product(this.vocabulary, h, n - from, this.logits + 4 * from * this.vocab);
    this.length += n;
  }

  row(r) { return this.arena.read(this.logits + 4 * r * this.vocab, this.vocab); }
}

// The trained head: one layer that reads the next token and what the model thought before it.
class Head extends Layers {
  constructor(kernel, arena, tensors, model) {
    super(kernel, arena, model.sizes, 32, 1);
    this.model = model;
    const of = (name) => tensors[`layers.0.${name}.weight`];
    const floats = ({ at, shape: [n] }) => { // a norm's weights as floats
      const to = arena.floats(n), halves = new Uint16Array(arena.memory.buffer.slice(at, at + 2 * n));
      new Uint32Array(arena.memory.buffer, to, n).set(Uint32Array.from(halves, (half) => half << 16));
      return to;
    };
    this.weights = { q: of("self_attn.q_proj"), k: of("self_attn.k_proj"), v: of("self_attn.v_proj"), out: of("self_attn.o_proj"),
      mlpNorm: floats(of("post_attention_layernorm")), gate: of("mlp.gate_proj"), up: of("mlp.up_proj"), down: of("mlp.down_proj") };
    this.norms = [floats(of("input_layernorm")), floats(of("hidden_norm"))];
    this.norm = floats(tensors["norm.weight"]);
    this.fc = tensors["fc.weight"];
    this.out = tensors["lm_head.weight"];
    const [size] = tensors.d2t.shape, start = tensors.d2t.at; // the draft vocabulary: draft id + d2t[draft id]
    this.tokens = Array.from(new BigInt64Array(arena.memory.buffer.slice(start, start + 8 * size)), (more, i) => i + Number(more));
    this.logits = arena.floats(size);
  }

  arrange() {} // its weights lie in plain order

  // Read n tokens, each with the fused feature (or the state) in its row of this.x; returns the logits after the last.
  // Its state is moved to row 0, where the next step finds it.
  step(ids) {
    const { kernel, arena, x, h, hidden, eps, model } = this, n = ids.length;
    ids.forEach((id, r) => model.embed(id, this.up + 4 * r * hidden));
    kernel.norm(this.up, this.norms[0], hidden, eps, n, h, 2 * hidden);
    kernel.norm(x, this.norms[1], hidden, eps, n, h + 4 * hidden, 2 * hidden);
    this.layer(0, this.weights, n);
    this.length += n;
    const floats = arena.read(x, n * hidden);
    floats.copyWithin(0, (n - 1) * hidden);
    kernel.norm(x, this.norm, hidden, eps, 1, h, hidden);
    this.product(this.out, h, 1, this.logits);
    return arena.read(this.logits, this.tokens.length);
  }

  // Read tokens with the model's features, those of positions `from` on.
  read(ids, from) {
    const wide = 4 * FEATURES.length * this.hidden;
    for (let r = 0; r < ids.length; r += ROWS) {
      const some = ids.slice(r, r + ROWS);
      this.product(this.fc, this.model.features + (from + r) * wide, some.length, this.x);
      this.step(some);
    }
    return this.arena.read(this.logits, this.tokens.length);
  }
}

// ---- Drafters -------------------------------------------------------------------------------------------------------

// Each proposes for a sequence `tokens` that only grows: at most K draft tokens.
const plain = () => () => [];

// What followed the last tokens where they stood before: the latest place, of the longest ending that has one.
const lookup = (tokens) => {
  const seen = new Map();
  let indexed = 0;
  return (K) => {
    for (; indexed < tokens.length; indexed++) {
      for (let n = 1; n <= Math.min(LONGEST, indexed); n++) seen.set(String(tokens.slice(indexed - n, indexed)), indexed);
    }
    for (let n = Math.min(LONGEST, tokens.length); n > 0; n--) {
      const start = seen.get(String(tokens.slice(-n)));
      if (start !== undefined) return tokens.slice(start, start + K);
    }
    return [];
  };
};

// A chain of the head's likeliest tokens: after the accepted ones it reads the model's features, after its own its state.
const chain = (tokens, head, eos) => {
  let read = 0; // positions read with the model's features; token i + 1 goes with the feature of position i
  return (K) => {
    const drafted = [];
    head.rollback(read);
    let logits = head.read(tokens.slice(read + 1), read);
    read = head.length;
    while (drafted.length < K && !eos.has(drafted.at(-1))) {
      if (drafted.length) logits = head.step(drafted.slice(-1));
      drafted.push(head.tokens[likeliest(logits)]);
    }
    return drafted;
  };
};

// ---- Decoding -------------------------------------------------------------------------------------------------------

const now = () => performance.now() / 1000; // seconds

// The likeliest tokens of a distribution, largest first: [id, text, probability].
const top = (p, tokenizer) => {
  const best = [];
  p.forEach((prob, id) => {
    if (prob <= 0 || (best.length === SHOWN && prob <= best[SHOWN - 1][1])) return;
    let at = best.length;
    while (at > 0 && best[at - 1][1] < prob) at--;
    best.splice(at, 0, [id, prob]);
    best.length = Math.min(best.length, SHOWN);
  });
  return best.map(([id, prob]) => [id, tokenizer.text(id), prob]);
};

// The rounds of one text, as `specdec.speculate` makes them: K draft tokens in each, or with `adaptive` as many as pay.
// Between two rounds, and between two pieces of the prompt, `pause` lets messages in; it says whether to stop.
async function* decode(engine, ids, { K, temperature, seed, maxNewTokens, drafter, adaptive = false }, pause, progress = () => {}) {
  const { model, head, tokenizer, eos } = engine, rng = new SeededRandom(seed);
  const tokens = [...ids], limit = Math.min(ids.length + maxNewTokens, CAPACITY);
  const at = (row) => distribution(model.row(row), temperature), own = (p) => choose(p, temperature, rng);
  const spoken = tokenizer.reader(), pace = adaptive && drafter !== "plain" ? new Pace(drafter) : null;
  const told = (p, one) => ({ ...one, text: tokenizer.text(one.id), p: p[one.id], top: top(p, tokenizer) });
  let before = now();
  model.rollback(0);
  head?.rollback(0);
  for (let start = 0; start < ids.length; start += ROWS) {
    const some = ids.slice(start, start + ROWS);
    model.forward(some, start + ROWS >= ids.length ? some.length - 1 : some.length);
    progress(model.length, ids.length);
    if (await pause()) return;
  }
  const p = at((ids.length - 1) % ROWS), first = own(p);
  tokens.push(first.id);
  yield { start: 0, forwards: 1, drafts: [], emitted: [first.id], token: { ...told(p, first), text: spoken(first.id), kind: "plain" }, seconds: { draft: 0, target: now() - before } };
  const propose = { plain, lookup, head: chain }[drafter](tokens, head, eos);
  while (tokens.length < limit && !eos.has(tokens.at(-1))) {
    before = now();
    const room = Math.max(0, Math.min(K, limit - tokens.length - 1)), most = pace && drafter === "head" ? pace.choose(room) : room;
    const proposed = most ? propose(most) : [], draft = pace && drafter === "lookup" ? proposed.slice(0, pace.choose(proposed.length)) : proposed;
    const n = draft.length, drafted = now();
    model.forward([tokens.at(-1), ...draft]);
    const p = Array.from({ length: n + 1 }, (_, row) => at(row)), found = verify(draft, (i) => own(p[i])), accepted = found.length - 1;
    const seconds = { draft: drafted - before, target: now() - drafted };
    const emitted = found.map(({ id }) => id), end = emitted.findIndex((id) => eos.has(id));
    if (end >= 0) emitted.length = end + 1;
    const start = tokens.length - ids.length, texts = emitted.map(spoken);
    tokens.push(...emitted);
    pace?.learn(n, accepted, seconds);
    model.rollback(tokens.length - 1); // all but the last, which the next forward reads
    const owns = found.map((one, i) => told(p[i], one));
    const drafts = draft.map((id, i) => ({ id, text: i < accepted && texts[i] || tokenizer.text(id), p: p[i][id], accepted: i < accepted, own: owns[i] ?? null }));
    yield { start, forwards: 1, drafts, emitted, seconds, token: { ...owns.at(-1), text: texts[accepted] ?? owns.at(-1).text, kind: !n ? "plain" : accepted < n ? "corrected" : "bonus" } };
    if (await pause()) return;
  }
}

// ---- Loading --------------------------------------------------------------------------------------------------------

const hex = (buffer) => Array.from(new Uint8Array(buffer), (b) => b.toString(16).padStart(2, "0")).join("");
const digest = async (bytes) => hex(await crypto.subtle.digest("SHA-256", bytes));
const count = (n) => n.toLocaleString("en-US");

const get = async (url, signal, what) => {
  let response;
  try { response = await fetch(url, { signal }); } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure("network", "The connection is down: go online, and press the button again. What has arrived is kept.");
  }
  if (response.ok) return response;
  throw new Failure("network", `${what} can't be fetched (${response.status}): this site has no weights beside it. Serve it with \`specdec live\`, or choose the model's file.`);
};

// Read a stream into memory from `at` on, no more than `size` bytes; returns how many there were.
const fill = async (stream, memory, at, size, arrived, signal) => {
  const reader = stream.getReader();
  let read = 0;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      signal.throwIfAborted();
      if (done) return read;
      if (read + value.length > size) return read + value.length;
      new Uint8Array(memory.buffer, at + read, value.length).set(value);
      arrived(read += value.length);
    }
  } finally { reader.cancel().catch(() => {}); }
};

// One file out of its parts: from what the browser keeps, or from the site.
const loadParts = async (arena, { name, bytes, sha256, parts }, base, what, signal) => {
  const cache = self.caches && await caches.open(CACHE + sha256), at = arena.take(bytes);
  let end = 0;
  for (const [i, part] of parts.entries()) {
    const url = new URL(part.path, base).href, here = `Part ${i + 1} of ${parts.length} of ${name}`;
    const kept = await cache?.match(url);
    const response = kept || await get(url, signal, here);
    const arrived = (n) => postMessage({ type: "progress", what, done: end + n, total: bytes });
    let read;
    try { read = await fill(response.body, arena.memory, at + end, part.bytes, arrived, signal); } catch (error) {
      if (signal.aborted) throw error;
      throw new Failure("network", `${here} stopped arriving: is the connection down? Try again; what has arrived is kept.`);
    }
    const found = new Uint8Array(arena.memory.buffer, at + end, part.bytes);
    const right = read === part.bytes && await digest(found) === part.sha256;
    if (!right) await cache?.delete(url);
    if (read < part.bytes) throw new Failure("truncated", `${here} has ${count(read)} bytes where ${count(part.bytes)} are expected: try again.`);
    if (!right) throw new Failure("wrong-file", `${here} isn't the one that parts.json lists: its SHA-256 is another. Try again, or choose the model's file.`);
    if (!kept && cache) await cache.put(url, new Response(found.slice())).catch(() => {}); // a full disk: it is only not kept
    end += part.bytes;
  }
  return { at, size: bytes, name };
};

const loadFile = async (arena, file, what, signal) => {
  const at = arena.take(file.size);
  const arrived = (n) => postMessage({ type: "progress", what, done: n, total: file.size });
  try { await fill(file.stream(), arena.memory, at, file.size, arrived, signal); } catch (error) {
    if (signal.aborted) throw error;
    throw new Failure("wrong-file", `${file.name} can't be read (${error.message}): choose it again.`);
  }
  return { at, size: file.size, name: file.name };
};

const checkModel = async ({ at, size, name }, arena) => {
  const bytes = new Uint8Array(arena.memory.buffer, at, size), advice = `choose ${MODEL_FILE}, ${count(MODEL_BYTES)} bytes, as published.`;
  const magic = new TextDecoder().decode(bytes.subarray(0, 4));
  if (magic !== "GGUF") throw new Failure("wrong-file", `${name} is no GGUF file: ${advice}`);
  if (size < MODEL_BYTES && name === MODEL_FILE) throw new Failure("truncated", `${name} has ${count(size)} bytes where ${count(MODEL_BYTES)} are expected: fetch it again.`);
  if (size !== MODEL_BYTES || await digest(bytes) !== MODEL_SHA256) throw new Failure("wrong-file", `${name} is another file than the default model's: ${advice}`);
};

const makeHead = (kernel, arena, { at, size, name }, model) => {
  let tensors;
  try { tensors = readHead(arena.memory.buffer, at, size); } catch (error) {
    throw new Failure("wrong-file", `${name} isn't the head that the package ships (${error.message}): choose its safetensors file, or go on without a head.`);
  }
  return new Head(kernel, arena, tensors, model);
};

const kernelBytes = async () => {
  const bytes = await (await get(new URL("kernel.wasm", self.location.href), undefined, "The kernel")).arrayBuffer();
  if (!WebAssembly.validate(bytes)) throw new Failure("no-simd", "This browser has no SIMD in WebAssembly: take a current Chrome, Edge, Firefox or Safari.");
  return bytes;
};

const load = async ({ base, files }, signal) => {
  if (!self.crypto?.subtle) throw new Failure("bad-input", "A browser checks files on safe pages only: open this one by https, or from 127.0.0.1.");
  const bytes = await kernelBytes(), memory = new WebAssembly.Memory({ initial: 2 });
  const { instance: { exports: kernel } } = await WebAssembly.instantiate(bytes, { env: { memory } });
  const arena = new Arena(memory, kernel.__heap_base.value);
  let model, head = null;
  if (files) {
    if (!(files.model instanceof Blob)) throw new Failure("bad-input", `Choose the model's file: ${MODEL_FILE}.`);
    if (files.model.size > 2 * MODEL_BYTES) throw new Failure("wrong-file", `${files.model.name} has ${count(files.model.size)} bytes: choose ${MODEL_FILE}, ${count(MODEL_BYTES)} bytes, as published.`);
    model = await loadFile(arena, files.model, "model", signal);
    await checkModel(model, arena);
    if (files.head) head = await loadFile(arena, files.head, "head", signal);
  } else {
    const from = new URL(base, new URL("../", self.location.href));
    const listed = await (await get(new URL("parts.json", from), signal, "The list of the model's parts")).json().catch(() => {
      throw new Failure("network", "The list of the model's parts, parts.json, can't be read: choose the model's file instead.");
    });
    model = await loadParts(arena, listed.model, from, "model", signal);
    if (listed.head) head = await loadParts(arena, listed.head, from, "head", signal);
    const kept = [listed.model, listed.head].map((each) => each && CACHE + each.sha256);
    for (const name of await self.caches?.keys() ?? []) if (name.startsWith(CACHE) && !kept.includes(name)) await caches.delete(name);
  }
  let read;
  try { read = readGGUF(memory.buffer, model.at, model.size); } catch (error) {
    throw new Failure("wrong-file", `${model.name} can't be read as a GGUF file (${error.message}): choose ${MODEL_FILE}.`);
  }
  const { says } = read, of = (name) => says[`tokenizer.ggml.${name}`];
  const tokenizer = new Tokenizer(of("tokens"), of("token_type"), of("merges")), target = new Model(kernel, arena, read);
  return { model: target, head: head && makeHead(kernel, arena, head, target), tokenizer, eos: new Set([of("eos_token_id")]),
    name: says["general.name"], bytes: model.size + (head?.size ?? 0) };
};

// ---- Messages -------------------------------------------------------------------------------------------------------

let engine = null, loading = null, running = null;

const whole = (value, low, high, name) => {
  if (Number.isInteger(value) && value >= low && value <= high) return;
  throw new Failure("bad-input", `${name} must be a whole number from ${count(low)} to ${count(high)}, not ${JSON.stringify(value)}.`);
};

// The token ids of a request; everything in it is checked before anything is computed.
const checked = ({ prompt, ids, K, temperature, seed, maxNewTokens, drafter, adaptive = false }) => {
  if (!engine) throw new Failure("bad-input", "There is no model yet: load it first.");
  if (!["plain", "lookup", "head"].includes(drafter)) throw new Failure("bad-input", `drafter must be "plain", "lookup" or "head", not ${JSON.stringify(drafter)}.`);
  if (drafter === "head" && !engine.head) throw new Failure("bad-input", "No head was loaded: take the drafter \"lookup\", or load the head's file with the model's.");
  whole(K, 1, ROWS - 1, "K, the draft tokens of a round,");
  whole(seed, 0, 2 ** 32 - 1, "seed");
  whole(maxNewTokens, 1, 2 ** 31, "maxNewTokens");
  if (typeof adaptive !== "boolean") throw new Failure("bad-input", `adaptive must be true, for as many draft tokens as pay, or false, not ${JSON.stringify(adaptive)}.`);
  if (!(typeof temperature === "number" && temperature >= 0 && temperature < Infinity)) throw new Failure("bad-input", `temperature must be 0 (greedy) or a positive number, not ${JSON.stringify(temperature)}.`);
  if ((prompt === undefined) === (ids === undefined)) throw new Failure("bad-input", "Give either prompt, a text, or ids, a list of token ids.");
  if (ids !== undefined) {
    if (!Array.isArray(ids)) throw new Failure("bad-input", "ids must be a list of token ids.");
    ids.forEach((id) => whole(id, 0, engine.model.vocab - 1, "A token id"));
  } else if (typeof prompt !== "string" || !prompt.trim()) throw new Failure("bad-input", "The prompt is empty: write a message.");
  const found = ids ?? engine.tokenizer.chat(prompt);
  if (!found.length) throw new Failure("bad-input", "The prompt is empty: give at least one token.");
  if (found.length >= CAPACITY) throw new Failure("bad-input", `The prompt has ${count(found.length)} tokens, and the page has room for ${count(CAPACITY)} with the answer: shorten it.`);
  return found;
};

// A turn of the event loop, so that messages come in; MessageChannel, because timers wait longer and longer.
const turn = () => new Promise((done) => {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => { port1.close(); done(); };
  port2.postMessage(0);
});

const generate = async ({ id, options }) => {
  const ids = checked(options), rounds = [], run = running = { id, playing: !options.paced, cancelled: false, wake: null };
  const pause = async () => {
    await turn();
    return run.cancelled;
  };
  const progress = (done, total) => postMessage({ type: "progress", what: "prompt", done, total });
  const emitted = [];
  for await (const round of decode(engine, ids, options, pause, progress)) {
    rounds.push(round);
    emitted.push(...round.emitted);
    postMessage({ type: "round", id, round });
    if (!run.playing) await new Promise((done) => { run.wake = done; });
    if (run.cancelled) break;
  }
  const end = engine.eos.has(emitted.at(-1)) ? "eos" : run.cancelled ? "cancelled" : "length";
  const text = engine.tokenizer.decode(emitted.filter((token) => !engine.tokenizer.special.has(token)));
  const seconds = rounds.reduce((sum, { seconds: { draft, target } }) => sum + draft + target, 0);
  postMessage({ type: "done", id, result: { ids: emitted, text, rounds, seconds, forwards: rounds.length, end } });
};

const failed = (error, id, signal) => {
  if (signal?.aborted) return postMessage({ type: "error", id, code: "cancelled", message: "Loading was cancelled: nothing is running." });
  const known = error instanceof Failure;
  const memory = error instanceof RangeError;
  const message = known ? error.message : memory ? "There is too little memory: close other pages and try again." : `The engine stopped (${error.message}): reload the page.`;
  postMessage({ type: "error", id, code: known ? error.code : memory ? "memory" : "bad-input", message });
};

// One thing at a time: a second text waits until the first is done.
let line = Promise.resolve();
const wake = (run, change) => { Object.assign(run, change); run.wake?.(); run.wake = null; };

self.onmessage = ({ data }) => {
  const { type, id } = data;
  if (type === "load") {
    const control = new AbortController();
    loading?.abort();
    loading = control;
    line = line.then(async () => {
      engine = null; // its memory is free before there is another
      try {
        control.signal.throwIfAborted();
        engine = await load(data, control.signal);
        postMessage({ type: "ready", info: { name: engine.name, bytes: engine.bytes, vocab: engine.model.vocab, head: !!engine.head, eos: [...engine.eos] } });
      } catch (error) { failed(error, undefined, control.signal); }
      if (loading === control) loading = null;
    });
  }
  if (type === "generate") {
    line = line.then(async () => {
      try { await generate(data); } catch (error) { failed(error, id); }
      running = null;
    });
  }
  if (type === "cancel") {
    if (id === undefined) loading?.abort();
    if (running && (id === undefined || running.id === id)) wake(running, { cancelled: true });
  }
  if (type === "next" && running?.id === id) wake(running, {});
  if (type === "play" && running?.id === id) wake(running, { playing: true });
  if (type === "clear" && self.caches) {
    caches.keys().then((names) => names.filter((name) => name.startsWith(CACHE)).forEach((name) => caches.delete(name)));
  }
};
