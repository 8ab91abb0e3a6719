// Part of worker.js, the engine of the live page: which tensors lie where in its two files.
"use strict";

// ---- Weights --------------------------------------------------------------------------------------------------------

const Q4_1 = 3, Q8_0 = 8, F32 = 0, BF16 = 30; // kinds of a tensor, as GGUF numbers them
const bytesOf = { [Q4_1]: [20, 32], [Q8_0]: [34, 32], [F32]: [4, 1], [BF16]: [2, 1] }; // so many bytes for so many weights

// The header of a GGUF file: what it says of itself, and where its tensors lie.
const readGGUF = (buffer, from, size) => {
  const view = new DataView(buffer, from, size), text = new TextDecoder();
  let at = 8;
  const u32 = () => view.getUint32((at += 4) - 4, true);
  const u64 = () => Number(view.getBigUint64((at += 8) - 8, true));
  const string = () => { const n = u64(); return text.decode(new Uint8Array(buffer, from + (at += n) - n, n)); };
  const value = (kind) => {
    if (kind === 8) return string();
    if (kind === 9) { const inner = u32(), n = u64(); return Array.from({ length: n }, () => value(inner)); }
    const read = ["getUint8", "getInt8", "getUint16", "getInt16", "getUint32", "getInt32", "getFloat32", "getUint8", , , "getBigUint64", "getBigInt64", "getFloat64"];
    const width = [1, 1, 2, 2, 4, 4, 4, 1, , , 8, 8, 8][kind];
    return view[read[kind]]((at += width) - width, true);
  };
  const count = u64(), entries = u64(), says = {}, tensors = {};
  for (let i = 0; i < entries; i++) { const name = string(); says[name] = value(u32()); }
  for (let i = 0; i < count; i++) {
    const name = string(), shape = Array.from({ length: u32() }, u64), kind = u32(), offset = u64();
    tensors[name] = { kind, shape: shape.reverse(), at: offset };
  }
  const align = says["general.alignment"] || 32, start = from + Math.ceil(at / align) * align;
  for (const tensor of Object.values(tensors)) {
    tensor.at += start;
    if (!bytesOf[tensor.kind]) throw new Error("a kind of tensor that isn't known here");
    const [bytes, weights] = bytesOf[tensor.kind];
    if (tensor.at + tensor.shape.reduce((a, b) => a * b) / weights * bytes > from + size) throw new Error("it ends inside a tensor");
  }
  return { says, tensors };
};

const HEAD = { // shapes of the head's tensors
  d2t: [8192], "fc.weight": [576, 1728], "layers.0.hidden_norm.weight": [576], "layers.0.input_layernorm.weight": [576],
  "layers.0.self_attn.q_proj.weight": [576, 1152], "layers.0.self_attn.k_proj.weight": [192, 1152],
  "layers.0.self_attn.v_proj.weight": [192, 1152], "layers.0.self_attn.o_proj.weight": [576, 576],
  "layers.0.mlp.gate_proj.weight": [1536, 576], "layers.0.mlp.up_proj.weight": [1536, 576],
  "layers.0.mlp.down_proj.weight": [576, 1536], "layers.0.post_attention_layernorm.weight": [576],
  "norm.weight": [576], "lm_head.weight": [8192, 576],
};
const FEATURES = [7, 18, 29]; // hidden states that it reads

// The tensors of a safetensors file with the head.
const readHead = (buffer, from, size) => {
  const view = new DataView(buffer, from, size), header = Number(view.getBigUint64(0, true));
  const said = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, from + 8, header)));
  const tensors = {};
  for (const [name, shape] of Object.entries(HEAD)) {
    const { dtype, shape: found, data_offsets: [start, end] } = said[name];
    const width = name === "d2t" ? 8 : 2;
    const fits = dtype === (name === "d2t" ? "I64" : "BF16") && String(found) === String(shape) && end - start === width * shape.reduce((a, b) => a * b);
    if (!fits || 8 + header + end > size) throw new Error(`${name} doesn't fit`);
    tensors[name] = { kind: BF16, shape, at: from + 8 + header + start };
  }
  return tensors;
};
