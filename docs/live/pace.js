// Part of worker.js, the engine of the live page: how many tokens to draft next. The package's clock and its chooser, for
// one drafter (`specdec.drafters.clock`, `specdec.drafters.choose`), number by number.
"use strict";

// ---- The clock decides ----------------------------------------------------------------------------------------------

const RECENT = 5;    // times of a length that count: their median is believed
const PROBE = 0.01;  // of the time, spent on finding out whether something else pays by now
const PRICES = { row: 0.03, lookup: 0.001, head: 0.07 }; // in plain steps, before any was timed
const PRIOR = 0.5, WEIGHT = 4, KEEP = 0.98; // how often a draft token is accepted, before any was tried; how tries count

// Straight lines between the ratios that are known, level beyond them.
const between = (ratios, n) => {
  const seen = [...ratios.keys()].sort((a, b) => a - b), i = seen.findIndex((length) => length >= n);
  if (i <= 0) return ratios.get(seen.at(i));
  const [a, b] = [seen[i - 1], seen[i]];
  return ratios.get(a) + (ratios.get(b) - ratios.get(a)) * ((n - a) / (b - a));
};

// Ratios times the shape of a prior; beyond the last one no less than the line that leads to it.
const estimate = (ratios, n, shape) => {
  const found = between(ratios, n) * shape(n), [first, last] = [Math.min(...ratios.keys()), Math.max(...ratios.keys())];
  if (n <= last || first === last) return found;
  const [low, high] = [first, last].map((seen) => ratios.get(seen) * shape(seen));
  return Math.max(found, low + (high - low) * (n - first) / (last - first));
};

// Seconds by length: the median of the last times, and what they say about other lengths.
class Times {
  constructor(shape, began = 0) { Object.assign(this, { shape, began, recent: new Map(), at: new Map(), known: new Map() }); }

  of(n, unknown = 1) { return estimate(this.known.size ? this.known : new Map([[1, unknown]]), n, this.shape); }

  beside(n) { // what the other lengths say about this one
    const others = new Map([...this.known].filter(([length]) => length !== n));
    return others.size ? estimate(others, n, this.shape) : null;
  }

  // Count a time. A first one that is far above its neighbours counts as twice these; a length that is dearer than its
  // neighbours say is forgotten, once another look is affordable.
  add(n, seconds, now) {
    const expected = this.beside(n), recent = [...this.recent.get(n) ?? [], seconds].slice(-RECENT);
    this.recent.set(n, recent);
    this.at.set(n, now);
    const median = [...recent].sort((a, b) => a - b)[(recent.length - 1) >> 1];
    this.known.set(n, (expected && recent.length === 1 ? Math.min(median, 2 * expected) : median) / this.shape(n));
    for (const length of [...this.known.keys()].sort((a, b) => a - b).slice(1)) {
      const beside = this.beside(length), excess = beside === null ? 0 : this.known.get(length) * this.shape(length) - beside;
      if (!(excess > 0 && excess < PROBE * (now - this.at.get(length)))) continue;
      this.known.delete(length);
      this.recent.delete(length);
    }
  }
}

class Pace {
  constructor(drafter) {
    const row = (rows) => 1 + PRICES.row * (rows - 1), token = (n) => PRICES[drafter] * n;
    Object.assign(this, { row, forwards: null, drafts: new Times(token), spent: 0, tries: new Map(), rested: 0 });
  }

  forward(rows) { return this.forwards ? this.forwards.of(rows) : new Times(this.row).of(rows); }
  price(n) { return (this.forward(1 + n) + this.drafts.of(n, this.forward(1))) / this.forward(1); } // of a round, in plain steps

  // Draft tokens, if a forward is twice as long as any that was timed
  reach() { return this.forwards ? Math.max(1, 2 * Math.max(...this.forwards.known.keys()) - 1) : Infinity; }

  // Expected tokens of rounds with 1, 2, … draft tokens
  expected(most) {
    let alpha = PRIOR, together = 1, total = 1; // each place starts from what is believed of the one before
    return Array.from({ length: most }, (_, i) => {
      const [accepted, tried] = this.tries.get(i) ?? [0, 0];
      alpha = (accepted + WEIGHT * alpha) / (tried + WEIGHT);
      return total += together *= alpha;
    });
  }

  due() { // whether a plain step should be timed again
    const times = this.forwards;
    if (!times) return true;
    const share = (times.recent.get(1) ?? []).length > 2 ? PROBE : 10 * PROBE;
    const wasted = Math.min(...[...times.known.keys()].map((rows) => times.of(rows))) / 2;
    return share * (this.spent - (times.at.get(1) ?? times.began)) > wasted;
  }

  // So many draft tokens, of at most `most`: those with the most expected tokens for their time. If no draft beats a plain
  // step, none, but for one token now and then, to find out whether that has changed.
  choose(most) {
    let best = 1, chosen = 0;
    const tokens = this.expected(Math.min(most, this.reach()));
    tokens.forEach((some, i) => {
      const rate = some / this.price(i + 1);
      if (rate > best) [best, chosen] = [rate, i + 1];
    });
    if (chosen) return this.due() ? 0 : chosen;
    return most && this.price(1) - tokens[0] < this.rested * PROBE ? 1 : 0;
  }

  // Count a round: its forward, what became of its draft, the draft's time.
  learn(n, accepted, seconds) {
    this.forwards ??= new Times(this.row, this.spent);
    this.spent += seconds.target;
    this.forwards.add(1 + n, seconds.target, this.spent);
    if (!n) { this.rested += 1; return; }
    const lost = Math.max(0, this.price(1) - 2); // what was accepted is followed up at once, unless even two tokens were dear
    this.rested = accepted ? Math.max(0, this.rested - lost / PROBE) : 0;
    for (const [i, [a, all]] of this.tries) this.tries.set(i, [KEEP * a, KEEP * all]);
    for (let i = 0; i < Math.min(accepted + 1, n); i++) {
      const [a, all] = this.tries.get(i) ?? [0, 0];
      this.tries.set(i, [a + (i < accepted), all + 1]);
    }
    this.spent += seconds.draft;
    this.drafts.add(n, seconds.draft, this.spent);
  }
}
