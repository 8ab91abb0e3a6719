// One token, a thousand times: q is dragged, tokens are thrown, rounds are raced, over one state that the address keeps.
// data/touch.json holds real rows and measured points (tools/touch.py wrote it); everything else is computed here, and
// specdec/panel/touch.py computes the same. Without this script a picture stays there.
(() => {
  "use strict";
  const WHOLE = 1000;     // p and q are counted in thousandths, so that both sum to exactly one
  const MOST = 200000;    // throws
  const EPSILON = 0.02;   // of the last rule
  const LONGEST = 16;     // the largest K
  const TOKENS = 24;      // of the race
  const APART = 10.5;     // of points on the map, at least
  const LEVELS = [1, 1.25, 1.5, 2, 3, 4];
  const SHAPES = { g: 1, path: 1, text: 1, circle: 1, rect: 1, svg: 1, };

  const make = (tag, attributes = {}, ...children) => {
    const element = tag in SHAPES ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const swatch = (kind) => make("span", { class: `touch-swatch touch-${kind}` }), part = (kind) => make("span", { class: `touch-part touch-${kind}` });
  const output = (kind) => make("output", { class: `touch-value touch-${kind}` });
  const text = (kind, ...words) => make("p", { class: `touch-${kind}` }, ...words);
  const sum = (row) => row.reduce((total, x) => total + x, 0);
  const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
  const digits = (x, n = 3) => x.toFixed(n);
  const on = (element, name, act) => element.addEventListener(name, act);
  const replay = (name, ...moving) => moving.forEach((e) => { e.classList.remove(name); void e.offsetWidth; e.classList.add(name); });
  // What a pointer drags. A finger drags the grip alone, or taps: a thumb that passes scrolls the page.
  const draggable = (element, grip, follow, hold = () => {}) => {
    let held = false;
    const finger = (event) => event.pointerType === "touch" && event.target !== grip;
    const begin = (event, meant) => {
      if (!meant || event.button || event.target.closest(".touch-point")) return false;
      hold();
      follow(event);
      return true;
    };
    on(element, "pointerdown", (event) => {
      held = begin(event, !finger(event));
      if (held) element.setPointerCapture(event.pointerId);
      if (held) event.preventDefault();
    });
    on(element, "pointermove", (event) => held && follow(event));
    on(element, "lostpointercapture", () => { held = false; });
    on(element, "click", (event) => begin(event, finger(event)));
  };

  const figure = (element, value, words) => { element.dataset.value = value; element.textContent = words; };

  // Whole thousandths in proportion to weights, as the largest remainders want it; equal shares where all weights are 0.
  const shared = (weights, total) => {
    const all = sum(weights), exact = weights.map((w) => (all ? (w * total) / all : total / weights.length));
    const found = exact.map(Math.floor), left = total - sum(found);
    const order = exact.map((x, i) => i).sort((a, b) => (exact[b] - found[b]) - (exact[a] - found[a]) || a - b);
    for (const i of order.slice(0, left)) found[i] += 1;
    return found;
  };
  // q with one word at a new height; the others keep their proportions.
  const dragged = (q, word, to) => {
    const others = shared(q.filter((_, i) => i !== word), WHOLE - to);
    return [...others.slice(0, word), to, ...others.slice(word)];
  };
  const overlap = (p, q) => sum(p.map((x, i) => Math.min(x, q[i])));
  // A q whose overlap with p is so many thousandths: p, with probability moved to the word that q overrates most.
  const pulled = (p, q, alpha) => {
    const over = q.map((x, i) => x - p[i]), smallest = p.indexOf(Math.min(...p));
    let word = Math.max(...over) > 0 ? over.indexOf(Math.max(...over)) : smallest;
    if (p[word] > alpha) word = smallest;
    return dragged(p, word, Math.min(WHOLE, p[word] + WHOLE - Math.max(alpha, p[word])));
  };

  const left = (p, q) => {
    const rest = p.map((x, i) => Math.max(0, x - q[i]));
    return sum(rest) ? rest : p;
  };
  const ratio = (p, q) => p.map((x, i) => (q[i] ? Math.min(1, x / q[i]) : 1));
  const likeliest = (q) => q.map((_, i) => (i === q.indexOf(Math.max(...q)) ? WHOLE : 0));
  // What is guessed from, how often a guess is kept, what is drawn from after a rejection.
  const RULES = {
    exact: { name: "the rule", guess: (p, q) => q, keep: ratio, rest: left },
    no_residual: { name: "no residual: draw from p instead", guess: (p, q) => q, keep: ratio, rest: (p) => p },
    keep_with_p: { name: "keep with p, not with p/q", guess: (p, q) => q, keep: (p) => p.map((x) => x / WHOLE), rest: left },
    greedy_draft: { name: "guess q’s likeliest word", guess: (p, q) => likeliest(q), keep: ratio, rest: left },
    epsilon: { name: "an epsilon in the residual", guess: (p, q) => q, keep: ratio, rest: (p, q) => left(p, q).map((x) => x + EPSILON * WHOLE) },
  };
  const parts = ({ rule, p, q }) => ({ guess: RULES[rule].guess(p, q), keep: RULES[rule].keep(p, q), rest: RULES[rule].rest(p, q) });
  // The distribution of the word that comes out.
  const law = (state) => {
    const { guess, keep, rest } = parts(state), kept = guess.map((x, i) => (x / WHOLE) * keep[i]), missing = 1 - sum(kept), all = sum(rest);
    return kept.map((x, i) => x + (missing * rest[i]) / all);
  };
  const distance = (a, b) => sum(a.map((x, i) => Math.abs(x - b[i]))) / 2;
  const shares = (row) => row.map((x) => x / WHOLE);

  // A small generator with a seed (mulberry32), so that an address shows everyone the same throws.
  const uniforms = (seed) => () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const pick = (weights, u) => {
    let rest = u * sum(weights);
    for (let i = 0; i < weights.length; i++) if (weights[i] && (rest -= weights[i]) < 0) return i;
    return weights.findLastIndex((w) => w > 0);
  };
  const thrown = (state) => {
    const { guess, keep, rest } = parts(state), next = uniforms(1), counts = state.p.map(() => 0);
    let kept = 0, last = null;
    for (let n = 0; n < state.n; n++) {
      const u = [next(), next(), next()], drafted = pick(guess, u[0]), accepted = u[1] < keep[drafted];
      const word = accepted ? drafted : pick(rest, u[2]);
      counts[word] += 1;
      kept += accepted;
      if (n === state.n - 1) last = { u, drafted, accepted, word };
    }
    return { counts, kept, last, guess, keep, rest };
  };

  // The race
  const tau = (alpha, K) => (alpha === 1 ? K + 1 : (1 - alpha ** (K + 1)) / (1 - alpha));
  const price = ({ c, e }, K) => 1 + e * K + K * c;
  const gain = (alpha, at, K) => tau(alpha, K) / price(at, K);
  const best = (alpha, at) => {
    let found = 0, most = 1 + 1e-12;
    for (let K = 1; K <= LONGEST; K++) if (gain(alpha, at, K) > most) { most = gain(alpha, at, K); found = K; }
    return found;
  };

  const start = (root, data) => {
    const panels = (root.dataset.panels || "drag throw race").split(" ");
    const opening = () => {
      const row = Math.max(0, data.rows.findIndex((r) => r.name === root.dataset.row));
      return { row, q: [...data.rows[row].q], rule: "exact", n: 0, K: 4, c: 0.05, e: 0.03 };
    };
    const number = (text, low, high, otherwise) => (text !== null && text.trim() !== "" && isFinite(text) ? clamp(Number(text), low, high) : otherwise);
    const read = () => {
      const asked = new URLSearchParams(location.hash.slice(1)), at = opening();
      at.row = Math.round(number(asked.get("row"), 0, data.rows.length - 1, at.row));
      at.q = [...data.rows[at.row].q];
      const q = (asked.get("q") || "").split(".").map(Number);
      if (q.length === at.q.length && q.every((x) => Number.isInteger(x) && x >= 0) && sum(q) === WHOLE) at.q = q;
      if (asked.get("rule") in RULES) at.rule = asked.get("rule");
      at.n = Math.round(number(asked.get("n"), 0, MOST, at.n));
      at.K = Math.round(number(asked.get("K"), 1, LONGEST, at.K));
      at.c = number(asked.get("c"), 0, 1, at.c);
      at.e = number(asked.get("e"), -0.05, 1, at.e);
      return at;
    };
    let state = read();
    const write = () => {
      const { row, q, rule, n, K, c, e } = state, words = { row, q: q.join("."), rule, n, K, c: +c.toFixed(4), e: +e.toFixed(4) };
      history.replaceState(null, "", `#${Object.entries(words).map((pair) => pair.join("=")).join("&")}`);
    };
    const change = (some, animate = false) => {
      state = { ...state, ...some };
      write();
      draw(animate);
    };
    const row = () => data.rows[state.row];
    const full = () => ({ ...state, p: row().p });

    const button = (words, name, onClick) => {
      const made = make("button", { type: "button", class: `touch-button touch-${name}` }, words);
      on(made, "click", onClick);
      return made;
    };
    let ids = 0;
    const menu = (name, words, onChange) => {
      const id = `touch-${ids++}`, made = make("select", { id }, ...words.map((word, i) => make("option", { value: i }, word)));
      on(made, "change", () => onChange(made.selectedIndex));
      return { box: make("div", { class: "touch-choice" }, make("label", { for: id }, name), made), set: (i) => { made.selectedIndex = i; } };
    };
    const slider = (name, kind, low, high, step, words, onChange) => {
      const id = `touch-${ids++}`, value = make("output", { for: id, class: `touch-value touch-of-${kind}` });
      const made = make("input", { id, type: "range", min: low, max: high, step });
      on(made, "input", () => onChange(Number(made.value)));
      const set = (x) => { made.value = x; figure(value, x, words(x)); made.setAttribute("aria-valuetext", words(x)); };
      return { box: make("div", { class: "touch-slider" }, make("label", { for: id }, name), value, made), set };
    };
    const drawing = [];

    // Drag
    if (panels.includes("drag")) {
      const rows = menu("A real place", data.rows.map((r) => r.title), (i) => change({ row: i, q: [...data.rows[i].q] }));
      const alpha = output("alpha"), missed = output("missed");
      const places = row().p.map((_, i) => {
        const bits = Object.fromEntries(["kept", "residual", "rejected", "p"].map((kind) => [kind, part(kind)]));
        const grip = part("grip");
        const column = make("div", { class: "touch-column", role: "slider", tabindex: 0, "aria-orientation": "vertical", "aria-valuemin": 0, "aria-valuemax": WHOLE }, ...Object.values(bits), grip);
        const name = make("div", { class: "touch-word" }), said = make("div", { class: "touch-number" });
        let from = null;
        const follow = (event) => {
          const box = column.getBoundingClientRect(), to = clamp(Math.round((WHOLE * (box.bottom - event.clientY)) / box.height), 0, WHOLE);
          change({ q: dragged(from, i, to) });
        };
        draggable(column, grip, follow, () => { from = state.q; column.focus({ preventScroll: true }); });
        const steps = { ArrowUp: 10, ArrowRight: 10, ArrowDown: -10, ArrowLeft: -10, PageUp: 100, PageDown: -100, Home: -WHOLE, End: WHOLE };
        on(column, "keydown", (event) => {
          if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
          event.preventDefault();
          change({ q: dragged(state.q, i, clamp(state.q[i] + steps[event.key], 0, WHOLE)) });
        });
        return { bits, grip, column, name, said, box: make("div", { class: "touch-place" }, column, name, said) };
      });
      const said = text("said");
      root.append(make("section", { class: "touch-panel touch-drag", "aria-label": "Drag the draft’s distribution" },
        make("div", { class: "touch-title" }, "1 Drag q away from p"), rows.box, said,
        make("div", { class: "touch-bars" }, ...places.map((place) => place.box)),
        text("key", swatch("p"), "p, the target’s ", swatch("kept"), "p and q, the draft’s: kept ",
          swatch("rejected"), "q says it too often ", swatch("residual"), "left over: the residual"),
        text("line", "α = Σ min(p, q) = ", alpha, ": so often a guess is kept. 1 − α = ", missed, " is how far q is from p (total variation)."),
        make("div", { class: "touch-buttons" }, button("q as it was", "reset", () => change({ q: [...row().q] })), button("q = p", "same", () => change({ q: [...row().p] })),
          button("q as wrong as can be", "worst", () => { const word = row().p.indexOf(Math.min(...row().p)); change({ q: row().p.map((_, i) => (i === word ? WHOLE : 0)) }); }))));
      drawing.push(() => {
        const { words, p } = row(), share = overlap(p, state.q);
        rows.set(state.row);
        said.textContent = row().said;
        figure(alpha, share / WHOLE, digits(share / WHOLE));
        figure(missed, 1 - share / WHOLE, digits(1 - share / WHOLE));
        places.forEach(({ bits, grip, column, name, said: numbers }, i) => {
          const q = state.q[i], kept = Math.min(p[i], q), place = (element, low, high) => { element.style.bottom = `${(100 * low) / WHOLE}%`; element.style.height = `${(100 * (high - low)) / WHOLE}%`; };
          place(bits.p, 0, p[i]);
          place(bits.kept, 0, kept);
          place(bits.residual, kept, p[i]);
          place(bits.rejected, kept, q);
          grip.style.bottom = `${(100 * q) / WHOLE}%`;
          name.textContent = words[i];
          numbers.replaceChildren(make("span", { class: "touch-of-p" }, `p ${digits(p[i] / WHOLE)}`), " ", make("span", { class: "touch-of-q" }, `q ${digits(q / WHOLE)}`));
          column.setAttribute("aria-label", `q of “${words[i]}”`);
          column.setAttribute("aria-valuenow", q);
          column.setAttribute("aria-valuetext", `q ${digits(q / WHOLE)}, p ${digits(p[i] / WHOLE)}, kept ${digits(kept / WHOLE)}`);
        });
      });
    }

    // Throw
    if (panels.includes("throw")) {
      const names = Object.keys(RULES), rules = menu("Rule", names.map((name) => (name === "exact" ? "the rule as it is" : `broken: ${RULES[name].name}`)), (i) => change({ rule: names[i] }));
      const strip = (title) => {
        const track = make("div", { class: "touch-track" }), mark = make("span", { class: "touch-mark" });
        return { track, mark, box: make("div", { class: "touch-strip", "aria-hidden": "true" }, make("div", { class: "touch-strip-title" }, title), make("div", { class: "touch-rail" }, track, mark)) };
      };
      const strips = [strip("a guess falls on q"), strip("a coin u on [0, 1]: kept left of the cut"), strip("only after a rejection")];
      const bars = row().p.map(() => {
        const p = part("p"), bar = part("count"), mark = part("law");
        const name = make("div", { class: "touch-word" }), number = make("div", { class: "touch-number" }), column = make("div", { class: "touch-column touch-still" }, bar, p, mark);
        return { p, bar, mark, name, number, column, box: make("div", { class: "touch-place" }, column, name, number) };
      });
      const status = make("p", { class: "touch-status", role: "status" }), found = output("found"), exact = output("exact");
      const kept = output("share"), total = output("n"), verdict = text("verdict");
      const more = (n) => button(`×${n.toLocaleString("en")}`, `x${n}`, () => change({ n: Math.min(MOST, state.n + n) }, n === 1));
      root.append(make("section", { class: "touch-panel touch-throw", "aria-label": "Throw tokens" },
        make("div", { class: "touch-title" }, "2 Throw: what comes out"), rules.box,
        make("div", { class: "touch-buttons" }, make("span", {}, "Throw "), more(1), more(100), more(10000), button("Clear", "clear", () => change({ n: 0 }))),
        make("div", { class: "touch-strips" }, ...strips.map((each) => each.box)), status,
        make("div", { class: "touch-bars touch-histogram" }, ...bars.map((each) => each.box)),
        text("key", swatch("p"), "p ", swatch("count"), "what came out ", swatch("law"), "where it settles, exactly"),
        text("line", total, ", ", kept, " Distance from p: ", found, " now, ", exact, " in the end, exactly."), verdict));
      drawing.push((animate) => {
        const at = full(), { words } = row(), { p } = at, came = thrown(at), end = law(at), target = shares(p), off = distance(end, target);
        rules.set(names.indexOf(state.rule));
        const lay = ({ track, mark }, sizes, kinds, labels, u) => {
          const all = sum(sizes);
          track.replaceChildren(...sizes.map((size, i) => (size ? make("span", { class: `touch-piece touch-${kinds[i]}`, style: `width:${(100 * size) / all}%` }, size / all > 0.07 ? labels[i] : "") : "")));
          mark.hidden = u === null;
          if (u !== null) mark.style.left = `${100 * u}%`;
        };
        const { last } = came, cut = last ? came.keep[last.drafted] : 1;
        lay(strips[0], came.guess, words.map(() => "q"), words, last && last.u[0]);
        lay(strips[1], last ? [cut, 1 - cut] : [overlap(p, state.q), WHOLE - overlap(p, state.q)], ["kept", "rejected"], ["kept", "rejected"], last && last.u[1]);
        lay(strips[2], came.rest, words.map(() => "residual"), words, last && !last.accepted ? last.u[2] : null);
        strips[2].box.classList.toggle("touch-idle", !last || last.accepted);
        if (animate) replay("touch-falls", ...strips.map((each) => each.box));
        status.textContent = !last ? "Nothing thrown yet." : `Throw ${state.n.toLocaleString("en")}: the guess is “${words[last.drafted]}”; the coin shows ${digits(last.u[1])}, kept below ${digits(cut)}: ` +
          (last.accepted ? "kept." : `rejected, and “${words[last.word]}” comes from ${state.rule === "no_residual" ? "p" : "the residual"}.`);
        const now = came.counts.map((x) => (state.n ? x / state.n : 0));
        bars.forEach(({ p: outline, bar, mark, name, number, column }, i) => {
          outline.style.height = `${100 * target[i]}%`;
          bar.style.height = `${100 * now[i]}%`;
          mark.style.bottom = `${100 * end[i]}%`;
          mark.hidden = state.rule === "exact";
          name.textContent = words[i];
          figure(number, end[i], state.n ? digits(now[i]) : "–");
          column.classList.toggle("touch-hit", !!last && last.word === i && state.n < MOST);
        });
        figure(total, state.n, `${state.n.toLocaleString("en")} thrown`);
        figure(kept, state.n ? came.kept / state.n : "", state.n ? `${digits(came.kept / state.n)} of the guesses kept.` : "none kept yet.");
        figure(found, state.n ? distance(now, target) : "", state.n ? digits(distance(now, target), 4) : "–");
        figure(exact, off, off < 1e-12 ? "0" : digits(off, 4));
        verdict.textContent = !state.n ? "Predict: will p come out, or q, or something between?" : state.rule === "exact"
          ? "Now drag q: the same throws are played again, and the bars stay at p. q changes only how often a guess is kept."
          : off < 1e-12 ? "With this q the broken rule happens to be right. Drag q away." : `Broken: no number of throws brings it to p. It settles ${digits(off, 4)} away.`;
      });
    }
    // Race
    if (panels.includes("race")) {
      const alphaOf = () => overlap(row().p, state.q), course = () => ({ c: state.c, e: state.e });
      const pull = (alpha) => pulled(row().p, state.q, Math.round(alpha));
      const lane = (title) => {
        const track = make("div", { class: "touch-track touch-lane" }), clock = make("span", { class: "touch-clock" });
        return { track, clock, box: make("div", {}, make("div", { class: "touch-head" }, make("strong", {}, title), clock), track) };
      };
      const plain = lane("plain"), guessing = lane("with guesses");
      const sliders = [
        slider("α, the share kept (moves q)", "share", 0, WHOLE, 1, (x) => digits(x / WHOLE), (x) => change({ q: pull(x) })),
        slider("K, guesses a round", "K", 1, LONGEST, 1, String, (K) => change({ K })),
        slider("c, one guess, in plain steps", "c", 0, 1, 0.005, (x) => digits(x), (c) => change({ c })),
        slider("e, reading one more token: v(K) = 1 + eK", "e", -0.05, 1, 0.005, (x) => digits(x), (e) => change({ e })),
      ];
      const speed = output("speed"), finest = output("best"), many = output("tau");
      const verdict = text("verdict"), named = make("p", { class: "touch-status touch-point-said", role: "status" });
      // The map: α across, c upwards as a root, since most drafts are cheap
      const WIDE = 360, HIGH = 250, LEFT = 34, LOW = 214, TOP = 8, RIGHT = 352;
      const X = (alpha) => LEFT + (RIGHT - LEFT) * alpha, Y = (c) => LOW - (LOW - TOP) * Math.sqrt(c);
      const lines = make("g"), dot = make("circle", { class: "touch-dot", r: 7 }), points = make("g");
      const map = make("svg", { class: "touch-map", viewBox: `0 0 ${WIDE} ${HIGH}`, role: "group", "aria-label": "The speed-up over α and c, with measured points" },
        make("rect", { class: "touch-field", x: LEFT, y: TOP, width: RIGHT - LEFT, height: LOW - TOP }), lines,
        ...[0, 0.25, 0.5, 0.75, 1].map((a) => make("text", { x: X(a), y: LOW + 15, "text-anchor": "middle" }, String(a))),
        ...[0, 0.05, 0.2, 0.5, 1].map((c) => make("text", { x: LEFT - 5, y: Y(c) + 4, "text-anchor": "end" }, String(c))),
        make("text", { x: (LEFT + RIGHT) / 2, y: LOW + 31, "text-anchor": "middle" }, "α"), make("text", { x: 4, y: Y(0.33), "text-anchor": "start" }, "c"), dot, points);
      let chosen = null;
      const load = (i) => {
        const point = data.points[i];
        change({ q: pull(WHOLE * point.alpha), K: point.K, c: point.c, e: (point.v - 1) / point.K });
        chosen = i;
        const S = gain(alphaOf() / WHOLE, course(), state.K);
        named.textContent = `${point.name}, K = ${point.K}: measured S = ${digits(point.measured, 2)}, the formula says ${digits(S, 2)}. ` +
          (S - point.measured > 0.1 ? "Lookup often has less than K to draft." : "");
        mark();
      };
      // Those that would lie on each other stand side by side
      const places = data.points.map((point) => [X(point.alpha), Y(point.c)]);
      for (let turn = 0; turn < 99; turn++) places.forEach((a, i) => places.forEach((b, j) => {
        const x = a[0] - b[0] || i - j, y = a[1] - b[1], far = Math.hypot(x, y), push = (APART - far) / far / 2;
        if (i <= j || push <= 0) return;
        [a, b].forEach((at, n) => { at[0] = clamp(at[0] + (n ? -x : x) * push, LEFT, RIGHT); at[1] = clamp(at[1] + (n ? -y : y) * push, TOP, LOW); });
      }));
      data.points.forEach((point, i) => {
        const made = make("circle", { class: "touch-point", cx: places[i][0], cy: places[i][1], r: 5, tabindex: i ? -1 : 0, role: "button", "aria-label": `Measured: ${point.name}, α ${digits(point.alpha, 2)}, c ${digits(point.c)}` });
        on(made, "click", (event) => { event.stopPropagation(); load(i); });
        on(made, "keydown", (event) => {
          const to = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1 }[event.key];
          if (event.key === "Enter" || event.key === " ") load(i);
          else if (to === undefined) return;
          else points.children[(to + data.points.length) % data.points.length].focus();
          event.preventDefault();
        });
        const name = () => { named.textContent = `${point.name}, K = ${point.K}: click to race with it.`; };
        on(made, "pointerenter", name);
        on(made, "focus", () => {
          for (const each of points.children) each.setAttribute("tabindex", each === made ? 0 : -1);
          name();
        });
        points.append(made);
      });
      const mark = () => { [...points.children].forEach((each, i) => each.classList.toggle("touch-chosen", i === chosen)); };
      const follow = (event) => {
        const box = map.getBoundingClientRect(), x = ((event.clientX - box.left) * WIDE) / box.width, y = ((event.clientY - box.top) * HIGH) / box.height;
        const up = clamp((LOW - y) / (LOW - TOP), 0, 1);
        change({ q: pull(WHOLE * clamp((x - LEFT) / (RIGHT - LEFT), 0, 1)), c: Number((up * up).toFixed(4)) });
      };
      draggable(map, dot, follow);
      const ladder = make("div", { class: "touch-ladder", role: "group", "aria-label": "The speed-up for each K" });
      const rungs = Array.from({ length: LONGEST }, (_, i) => {
        const bar = make("span", { class: "touch-rung" }), made = make("button", { type: "button", class: "touch-step" }, make("span", { class: "touch-well", "aria-hidden": "true" }, bar), make("span", {}, String(i + 1)));
        on(made, "click", () => change({ K: i + 1 }));
        ladder.append(made);
        return { bar, made };
      });
      root.append(make("section", { class: "touch-panel touch-race", "aria-label": "Race rounds against plain decoding" },
        make("div", { class: "touch-title" }, "3 Race: what α changes is time"),
        make("div", { class: "touch-halves" },
          make("div", {}, button("Race", "start", () => replay("touch-runs", plain.track, guessing.track)), plain.box, guessing.box,
            text("key", swatch("q"), "K guesses, c each ", swatch("kept"), "a forward that kept some; its tokens, one its own"),
            ...sliders.map((each) => each.box),
            text("line", "τ = ", many, " tokens a round; S = τ / (v(K) + Kc) = ", speed, ". The best K is ", finest, "."), verdict),
          make("div", {}, text("line", "The speed-up S at this K; red loses. Drag the dot, or click a measured one:"), map, named,
            text("line", "S for each K, the best in green:"), ladder))));
      drawing.push(() => {
        const share = alphaOf(), alpha = share / WHOLE, at = course(), { K } = state, round = price(at, K), next = uniforms(2), rounds = [];
        while (sum(rounds) + rounds.length < TOKENS) {
          let kept = 0;
          while (kept < K && next() < alpha) kept += 1;
          rounds.push(kept);
        }
        const end = rounds.length * round, longest = Math.max(TOKENS, end), S = gain(alpha, at, K), finds = best(alpha, at);
        [share, K, state.c, state.e].forEach((x, i) => sliders[i].set(x));
        const piece = (kind, size, words = "") => make("span", { class: `touch-piece touch-${kind}`, style: `flex:0 0 ${(100 * size) / longest}%` }, words);
        plain.track.replaceChildren(...Array.from({ length: TOKENS }, () => piece("plain", 1)));
        plain.clock.textContent = `${TOKENS} tokens, ${TOKENS} steps`;
        guessing.track.replaceChildren(...rounds.flatMap((kept) => [piece("q", K * state.c), piece(kept ? "kept" : "plain", 1 + state.e * K, String(kept + 1))]));
        guessing.clock.textContent = `${sum(rounds) + rounds.length} tokens, ${rounds.length} rounds, ${digits(end, 1)} steps`;
        figure(many, tau(alpha, K), digits(tau(alpha, K), 2));
        figure(speed, S, digits(S));
        figure(finest, finds, finds ? `${finds} (S = ${digits(gain(alpha, at, finds))})` : "0: don’t guess");
        verdict.textContent = `${S > 1 ? `On average ${digits(S, 2)} times as fast` : "Slower than plain decoding"}, ${state.rule === "exact" ? "with the same distribution" : "by the exact rule: yours is broken"}.`;
        const most = Math.max(1, ...rungs.map((_, i) => gain(alpha, at, i + 1)));
        rungs.forEach(({ bar, made }, i) => {
          const found = gain(alpha, at, i + 1);
          bar.style.height = `${(100 * found) / most}%`;
          made.classList.toggle("touch-finest", i + 1 === finds);
          made.setAttribute("aria-pressed", i + 1 === K);
          made.setAttribute("aria-label", `K = ${i + 1}: S = ${digits(found)}${i + 1 === finds ? ", the best" : ""}`);
        });
        ladder.style.setProperty("--one", `${100 / most}%`);
        dot.setAttribute("cx", X(alpha));
        dot.setAttribute("cy", Y(state.c));
        // Lines of equal speed-up: for each c, the α that gives it
        const level = (S) => {
          const found = [];
          for (let i = 0; i <= 40; i++) {
            const c = (i / 40) ** 2, wanted = S * price({ c, e: state.e }, K);
            if (wanted < 1 || wanted > K + 1) continue;
            let [low, high] = [0, 1];
            for (let j = 0; j < 30; j++) { const middle = (low + high) / 2; if (tau(middle, K) < wanted) low = middle; else high = middle; }
            found.push([X(low), Y(c)]);
          }
          return found;
        };
        lines.replaceChildren(...LEVELS.flatMap((S) => {
          const found = level(S);
          if (found.length < 2) return [];
          const [x, y] = found[0], [a, b] = found[Math.floor(found.length * 0.6)], path = `M${found.map((at) => at.map((z) => z.toFixed(1)).join(" ")).join("L")}`;
          const last = found[found.length - 1], loses = S === 1 ? [make("path", { class: "touch-loses", d: `${path}${last[1] > TOP + 1 ? `L${RIGHT} ${last[1].toFixed(1)}L${RIGHT} ${TOP}` : ""}L${LEFT} ${TOP}L${LEFT} ${y.toFixed(1)}Z` })] : [];
          return [...loses, make("path", { class: `touch-level${S === 1 ? " touch-one" : ""}`, d: path }), make("text", { class: "touch-level-name", x: a, y: b + 4, "text-anchor": "middle" }, String(S))];
        }));
        if (chosen !== null && Math.abs(data.points[chosen].c - state.c) > 1e-9) { chosen = null; named.textContent = ""; }
        mark();
      });
    }

    const draw = (animate = false) => { for (const each of drawing) each(animate); };
    on(window, "hashchange", () => { state = read(); draw(); });
    draw();
    for (const picture of root.querySelectorAll(":scope > :not(.touch-panel)")) picture.remove();
    root.dataset.ready = "true";
  };

  for (const root of document.querySelectorAll(".touch")) {
    fetch(root.dataset.rows).then((answer) => answer.json()).then((data) => start(root, data), () => {}); // the picture stays
  }
})();
