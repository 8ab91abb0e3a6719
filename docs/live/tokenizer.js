// Part of worker.js, the engine of the live page: from text to ids and back.
"use strict";

// ---- Tokenizer ------------------------------------------------------------------------------------------------------

// Byte-level BPE with the vocabulary and the merges of the GGUF file, cut as the package's tokenizer cuts: first each
// digit by itself, then the rest into words.
const SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const DIGIT = /(\p{N})/u;
const WORDS = new RegExp(`'(?:[stmd]|re|ve|ll)| ?\\p{L}+| ?[^${SPACE}\\p{L}]+|[${SPACE}]+(?![^${SPACE}])|[${SPACE}]+`, "gu");

const PIECE = "▯"; // of a character

class Tokenizer {
  constructor(tokens, kinds, merges) {
    this.tokens = tokens;
    this.ids = new Map(tokens.map((token, id) => [token, id]));
    this.ranks = new Map(merges.map((merge, rank) => [merge, rank]));
    this.special = new Set(tokens.flatMap((_, id) => kinds[id] === 3 ? [id] : []));
    const names = [...this.special].map((id) => tokens[id].replace(/[|\\{}()[\]^$+*?.]/g, "\\$&"));
    this.specials = new RegExp(`(${names.sort((a, b) => b.length - a.length).join("|")})`);
    // each byte as a letter that can be seen, as GPT-2 writes them
    this.letters = [];
    const seen = (b) => (b > 32 && b < 127) || (b > 160 && b !== 173);
    for (let b = 0, extra = 256; b < 256; b++) this.letters.push(String.fromCharCode(seen(b) ? b : extra++));
    this.bytes = new Map(this.letters.map((letter, b) => [letter, b]));
    this.known = new Map(); // words that were cut before
  }

  word(text) { // of one word, its ids: join the pair that was merged first, until none is left
    const found = this.known.get(text);
    if (found) return found;
    const parts = [...new TextEncoder().encode(text)].map((b) => this.letters[b]);
    while (parts.length > 1) {
      let best = Infinity, at = 0;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
        if (rank < best) [best, at] = [rank, i];
      }
      if (best === Infinity) break;
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
    const ids = parts.map((part) => this.ids.get(part)).filter((id) => id !== undefined);
    if (text.length < 32) this.known.set(text, ids);
    return ids;
  }

  encode(text) {
    const words = (part) => part.split(DIGIT).flatMap((piece, i) => i % 2 ? [piece] : piece.match(WORDS) || []);
    return text.split(this.specials).flatMap((part, i) =>
      i % 2 ? [this.ids.get(part)] : words(part).flatMap((word) => this.word(word)));
  }

  // The message of a user, as the model's chat template writes it.
  chat(message) {
    return this.encode("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
      + `<|im_start|>user\n${message}<|im_end|>\n<|im_start|>assistant\n`);
  }

  spelled(ids) { // as bytes
    return Uint8Array.from(ids.flatMap((id) => [...this.tokens[id]].flatMap((letter) => this.bytes.get(letter) ?? [])));
  }

  decode(ids) { return new TextDecoder().decode(this.spelled(ids)); }

  text(id) { // of one token, to show; a piece of a character has none
    const text = this.special.has(id) ? this.tokens[id] : this.decode([id]);
    return text.includes("\ufffd") ? PIECE : text;
  }

  // Reads a text token by token: a character of several tokens stands at its last.
  reader() {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return (id) => (this.special.has(id) ? this.tokens[id] : decoder.decode(this.spelled([id]), { stream: true })) || PIECE;
  }
}
