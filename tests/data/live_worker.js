// Speaks the engine's part of the protocol without a model: rounds are made up, errors come on demand. Of K
// draft tokens a round keeps `start mod (K + 1)`; a round takes five milliseconds.
const FAIL = "";        // an error's code: what loading ends with
const PACE = 20;        // ms for a tenth of the model
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const say = (message) => postMessage(message);
const WORDS = ["The", " quick", " brown", " fox", ".\n"];
let cancelled = false, held = null, playing = false, head = true;

const own = (id, greedy) => { // the target's own token at a place
  const p = greedy ? 1 : 0.6, one = { id, text: WORDS[id % 5], p, u: greedy ? null : 0.25, from: 0.2, to: 0.8 };
  return { ...one, top: [[id, one.text, p], ...(greedy ? [] : [[99, " slow", 0.2], [98, " <b>fast", 0.1]])] };
};
const load = async (message) => {
  cancelled = false;
  const bytes = 98362432, size = message.files ? message.files.model.size : bytes;
  if (message.files && !message.files.model.name.endsWith(".gguf")) return say({ type: "error", code: "wrong-file", message: `${message.files.model.name} is no GGUF file: choose SmolLM2-135M-Instruct.Q4_1.gguf.` });
  if (message.files && size < 10) return say({ type: "error", code: "truncated", message: `The file ends after ${size} bytes, and ${bytes} were expected: fetch it again.` });
  head = !message.files || !!message.files.head;
  for (let i = 1; i <= 10; i++) {
    say({ type: "progress", what: "model", done: (i * bytes) / 10, total: bytes });
    await wait(PACE);
    if (cancelled) return say({ type: "error", code: "cancelled", message: "Loading was cancelled." });
    if (FAIL && i === 5) return say({ type: "error", code: FAIL });
  }
  if (!message.files) await (await caches.open("specdec-live-test")).put("/part", new Response("x"));
  say({ type: "ready", info: { name: "SmolLM2-135M-Instruct", bytes, vocab: 49152, head, eos: [2] } });
};
const generate = async ({ id, options }) => {
  const { K, temperature, maxNewTokens, drafter, paced, prompt } = options, rounds = [], ids = [];
  if (prompt !== undefined && !prompt.trim()) return say({ type: "error", id, code: "bad-input", message: "The prompt is empty: write something first." });
  if (drafter === "head" && !head) return say({ type: "error", id, code: "bad-input", message: "There is no head." });
  [cancelled, playing] = [false, false];
  say({ type: "progress", what: "prompt", done: 10, total: 10 });
  while (ids.length < maxNewTokens && !cancelled) {
    const start = ids.length, greedy = temperature === 0, n = drafter === "plain" || !start ? 0 : Math.min(K, maxNewTokens - start - 1), kept = n ? start % (n + 1) : 0;
    const owns = Array.from({ length: kept + 1 }, (_, i) => own(start + i, greedy));
    const drafts = Array.from({ length: n }, (_, i) => {
      const accepted = i < kept, id = accepted ? start + i : start + i + 1000;
      return { id, text: WORDS[id % 5], p: accepted ? owns[i].p : greedy ? 0 : 0.05, accepted, own: owns[i] ?? null };
    });
    const token = { ...owns[kept], kind: !n ? "plain" : kept === n ? "bonus" : "corrected" };
    const round = { start, forwards: 1, drafts, token, emitted: owns.map(({ id }) => id), seconds: { draft: n * 0.0002, target: start ? 0.02 * (1 + 0.3 * n) : 0.3 } };
    await wait(5);
    rounds.push(round);
    ids.push(...round.emitted);
    say({ type: "round", id, round });
    if (prompt?.includes("break now")) throw new Error("broken on purpose");
    if (paced && !playing && ids.length < maxNewTokens) await new Promise((done) => { held = done; });
  }
  const seconds = rounds.reduce((all, r) => all + r.seconds.draft + r.seconds.target, 0);
  say({ type: "done", id, result: { ids, text: ids.map((each) => WORDS[each % 5]).join(""), rounds, seconds, forwards: rounds.length, end: cancelled ? "cancelled" : "length" } });
};
addEventListener("message", ({ data }) => {
  if (data.type === "load") load(data);
  if (data.type === "generate") generate(data).catch((error) => setTimeout(() => { throw error; }));
  if (data.type === "cancel") cancelled = true;
  if (data.type === "play") playing = true;
  if (["cancel", "next", "play"].includes(data.type)) held?.();
});
