// Part of worker.js, the engine of the live page: random numbers as PyTorch draws them, distributions, and the rules.
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

// An index in proportion to its weight: the cumulative sum, inverted at u.
const draw = (weights, u) => {
  let total = 0, sum = 0, last = 0;
  for (const w of weights) total += w;
  if (!(total > 0 && total < Infinity)) throw damaged();
  for (let i = 0; i < weights.length; i++) {
    if (weights[i] === 0) continue;
    sum += weights[i];
    last = i;
    if (sum > u * total) return i;
  }
  return last;
};

// max(p - q, 0); q null: certain of `token`. 0 everywhere only if p = q: then p.
const residual = (p, q, token) => {
  const rest = q ? p.map((each, i) => Math.max(each - q[i], 0)) : p.slice();
  if (!q) rest[token] = Math.max(p[token] - 1, 0);
  return rest.some((w) => w > 0) ? rest : p;
};

// Verify one draft, place by place: p[i] is what the model says at place i, q[i] what the draft token was drawn from, or
// null for one that was certain. At the first that fails the token comes from the residual; after the last one from p.
const verify = (p, q, tokens, uniform) => {
  const tried = [];
  for (let i = 0; i < tokens.length; i++) {
    const token = tokens[i], u = uniform(), ratio = p[i][token] / (q[i] ? q[i][token] : 1);
    if (!(ratio >= 0)) throw damaged();
    const accepted = u < Math.min(1, ratio);
    tried.push({ u, accepted });
    if (accepted) continue;
    const weights = residual(p[i], q[i], token), v = uniform();
    return { tried, accepted: i, token: draw(weights, v), u: v, weights };
  }
  const v = uniform();
  return { tried, accepted: tokens.length, token: draw(p[tokens.length], v), u: v, weights: null };
};

// The same at temperature 0: a draft token stays while it is the model's likeliest.
const verifyGreedy = (best, tokens) => {
  const tried = [];
  for (let i = 0; i < tokens.length; i++) {
    tried.push({ u: null, accepted: tokens[i] === best[i] });
    if (tokens[i] !== best[i]) return { tried, accepted: i, token: best[i], u: null };
  }
  return { tried, accepted: tokens.length, token: best[tokens.length], u: null };
};
