// Part of worker.js, the engine of the live page: random numbers as PyTorch draws them, distributions, and the rule.
"use strict";

// ---- Random numbers -------------------------------------------------------------------------------------------------

// MT19937, seeded and read as PyTorch's generator on a CPU: the same seed gives the uniform numbers of `SeededRandom`.
class SeededRandom {
  constructor(seed) {
    this.state = new Uint32Array(624);
    this.state[0] = seed;
    for (let i = 1; i < 624; i++) {
      const before = this.state[i - 1] ^ (this.state[i - 1] >>> 30);
      this.state[i] = Math.imul(1812433253, before) + i;
    }
    this.at = 624;
  }

  word() { // 32 random bits
    const s = this.state;
    if (this.at === 624) {
      for (let i = 0; i < 624; i++) {
        const both = (s[i] & 0x80000000) | (s[(i + 1) % 624] & 0x7fffffff);
        s[i] = s[(i + 397) % 624] ^ (both >>> 1) ^ (both & 1 ? 0x9908b0df : 0);
      }
      this.at = 0;
    }
    let y = s[this.at++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  }

  uniform() { // in [0, 1), 53 bits
    const high = this.word() & 0x1fffff, low = this.word();
    return (high * 2 ** 32 + low) * 2 ** -53;
  }
}

// ---- Distributions --------------------------------------------------------------------------------------------------

// As Python's `NumericalError`: there is nothing to draw from, and any token would be a wrong one.
const damaged = () => new Failure("numbers", "The model's numbers are damaged (NaN or infinite), so there is nothing to draw from: reload the page.");

// The index of the largest number, of ties the lowest. Any NaN, a +inf, and nothing but -inf are damage, wherever they are.
const likeliest = (row) => {
  let best = 0;
  for (let i = 0; i < row.length; i++) {
    if (Number.isNaN(row[i])) throw damaged();
    if (row[i] > row[best]) best = i;
  }
  if (!Number.isFinite(row[best])) throw damaged();
  return best;
};

// Logits to the distribution that is sampled from; at temperature 0 all of it is on the likeliest token.
const distribution = (logits, temperature) => {
  const p = new Float32Array(logits.length), best = likeliest(logits), top = logits[best];
  if (temperature === 0) { p[best] = 1; return p; }
  let sum = 0;
  for (let i = 0; i < p.length; i++) sum += p[i] = Math.exp((logits[i] - top) / temperature);
  for (let i = 0; i < p.length; i++) p[i] /= sum;
  return p;
};

// Tokens lie side by side from 0 to 1, each as wide as its probability: the one that u falls on, and where it lies.
const draw = (p, u) => {
  let total = 0, end = 0, found = null;
  for (const width of p) total += width;
  if (!(total > 0 && total < Infinity)) throw damaged();
  for (let id = 0; id < p.length && end <= u * total; id++) {
    if (p[id] === 0) continue;
    found = { id, from: end / total, to: (end + p[id]) / total };
    end += p[id];
  }
  return found;
};

// The target's own token: at a temperature one number of the seed draws it, at 0 it is the likeliest.
const choose = (p, temperature, rng) => {
  const u = temperature > 0 ? rng.uniform() : null;
  return { u, ...draw(p, u ?? 0) };
};

// The target's own tokens, `own(i)` at place i, as it would choose them without a draft: as long as the draft has the same,
// and one more. That one differs from the draft, or comes on top of all of it.
const verify = (draft, own) => {
  const found = [];
  do found.push(own(found.length)); while (found.at(-1).id === draft[found.length - 1]);
  return found;
};
