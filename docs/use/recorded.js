// Steps through recorded runs without a kernel. data/recorded.json holds what the package's own loop did (tools/record.py
// wrote it); nothing is decided here, only looked up, counted and drawn. Without this script a picture stays in its place.
// `data-open` says where a box opens: a round in which a draft token was rejected. A box with `data-alone` is what its page
// is about: the address keeps what it shows, and the averages stand below it.
(() => {
  "use strict";
  const MEANING = {
    target: "the target's own token", accepted: "draft token, accepted", rejected: "draft token, rejected: not in the text",
    corrected: "the target's token in place of the rejected one", bonus: "the target's token after a fully accepted draft",
  };
  const NEVER = "draft token, never tried: one before it was rejected";
  const SLOWER = 8;                  // a run of a second is played in eight
  const STEP = 1200;                 // milliseconds a round stands still where less motion is asked for
  const ROWS = 5;                    // of the microscope's table
  const here = document.currentScript.src;

  const make = (tag, attributes = {}, ...children) => {
    const element = tag === "svg" || tag in SHAPES ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const SHAPES = { g: 1, line: 1, path: 1, text: 1, circle: 1, rect: 1 };
  const digits = (x) => (x >= 0.9995 ? "1" : x < 0.0005 && x > 0 ? "<0.001" : x === 0 ? "0" : x.toFixed(3));
  const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  const sum = (rounds) => rounds.reduce((total, r) => total + r.emitted, 0);

  // What became of each token of a round, in the order of the draft: its text, its status, and its draft position.
  const spots = (r) => {
    const found = r.draft.map((token, i) => ({ token, i, status: i < r.accepted ? "accepted" : i === r.accepted ? "rejected" : "never" }));
    if (r.emitted <= r.accepted) return found.slice(0, r.emitted); // the text ends inside the draft
    const status = !r.draft.length ? "target" : r.accepted === r.draft.length ? "bonus" : "corrected";
    found.splice(status === "corrected" ? r.accepted + 1 : r.draft.length, 0, { token: r.own, i: r.accepted, status });
    return found;
  };

  // A choice among a few values, with a label that is always whole.
  let count = 0;
  const choice = (name, values, words, onChange) => {
    const id = `recorded-${count++}`;
    const menu = make("select", { id }, ...values.map((value) => make("option", { value }, words(value))));
    menu.addEventListener("change", () => onChange(values[menu.selectedIndex]));
    return { box: make("div", { class: "recorded-choice" }, make("label", { for: id }, name), menu), set: (value) => { menu.selectedIndex = values.indexOf(value); } };
  };
  const button = (name, words, onClick) => {
    const made = make("button", { type: "button", class: `recorded-button recorded-${name}` }, words);
    made.addEventListener("click", onClick);
    return made;
  };

  const bar = (parts, scale) => make("span", { class: "recorded-bar", "aria-hidden": "true" },
    ...parts.map(([kind, size]) => make("span", { class: `recorded-${kind}`, style: `width:${(100 * size) / scale}%` })));
  const row = (...cells) => make("tr", {}, ...cells.map((cell, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, cell)));
  const table = (caption, heads, rows) => make("table", {}, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, ...rows));

  const start = (root, data, averagesOf) => {
    const { runs: grid, prompts, drafters } = data.settings;
    const named = (columns, rows) => rows.map((values) => Object.fromEntries(columns.map((name, i) => [name, values[i]])));
    for (const run of data.runs) run.rounds = named(data.columns.rounds, run.rounds);
    data.cells = named(data.columns.cells, data.cells);
    const still = window.matchMedia("(prefers-reduced-motion: reduce)");
    const spelled = (token) => data.tokens[token].replaceAll("\n", "⏎");
    const quote = (token) => `“${spelled(token).trim() || "␣"}”`;
    const shown = (token) => make("span", { class: "recorded-token" }, spelled(token).replace(/^ /, "␣"));

    // The state: what the address keeps. `round` 0 is the prompt's forward; `token` counts the round's tokens from 0.
    const find = (at) => data.runs.find((run) => run.prompt === at.prompt && run.drafter === at.draft && run.temperature === at.T && run.K === at.K);
    const plainOf = (at) => data.plain.find((lane) => lane.prompt === at.prompt && lane.temperature === at.T);
    const deciding = (r) => { const found = spots(r); return Math.min(r.accepted, found.length - 1); };
    const stateOf = (words, otherwise) => {
      const asked = new URLSearchParams(words), at = { ...otherwise };
      const whole = (name, most) => Math.min(Math.max(Math.trunc(Number(asked.get(name))) || 0, 0), most);
      for (const [name, values] of [["prompt", grid.prompts], ["draft", Object.keys(drafters)], ["T", grid.temperatures], ["K", grid.Ks]]) {
        const value = values.find((each) => String(each) === asked.get(name));
        if (value !== undefined) at[name] = value;
      }
      at.round = whole("round", find(at).rounds.length);
      at.token = at.round ? (asked.has("token") ? whole("token", spots(find(at).rounds[at.round - 1]).length - 1) : deciding(find(at).rounds[at.round - 1])) : 0;
      return at;
    };
    const alone = root.dataset.alone === "true";
    const opening = stateOf(root.dataset.open, { prompt: grid.prompts[0], draft: Object.keys(drafters)[0], T: grid.temperatures[0], K: grid.Ks[0] });
    const read = () => (alone && new URLSearchParams(location.hash.slice(1)).has("round") ? stateOf(location.hash.slice(1), opening) : null);
    const address = () => `#${new URLSearchParams(at)}`;

    const firstSpot = (run) => ({ token: run.first, status: "target", i: 0 });
    let at = opening, clock = 0, playing = false, guided = false, frame = 0, timer = 0, last = 0;

    // Every change goes through here.
    const go = (change) => {
      if (guided) tour(null); // it speaks of one round, and a reader has gone on alone
      const before = find(at);
      at = { ...at, ...change };
      const run = find(at), most = run.rounds.length;
      if (run !== before && !("round" in change)) at.round = Math.min(at.round, most);
      at.round = Math.min(Math.max(at.round, 0), most);
      if (!("token" in change)) at.token = at.round ? deciding(run.rounds[at.round - 1]) : 0;
      if (!playing) clock = run.ends[at.round];
      if (alone) history.replaceState(null, "", address());
      draw();
    };

    const P = choice("Prompt", grid.prompts, (name) => prompts[name][0], (prompt) => { play(false); go({ prompt }); });
    const D = choice("Draft", Object.keys(drafters), (name) => drafters[name][0], (draft) => { play(false); go({ draft }); });
    const K = choice("K, guesses a round", grid.Ks, String, (value) => { play(false); go({ K: value }); });
    const T = choice("Temperature", grid.temperatures, (value) => (value ? String(value) : "0, greedy"), (value) => { play(false); go({ T: value }); });
    const player = button("play", "Play", () => play(!playing));
    const back = button("back", "Step back", () => { play(false); go({ round: at.round - 1 }); });
    const next = button("step", "Step", () => { play(false); go({ round: at.round + 1 }); });
    const slider = make("input", { type: "range", min: 0, step: 1, "aria-label": "Round" });
    slider.addEventListener("input", () => { play(false); go({ round: Number(slider.value) }); });
    const where = make("output", { class: "recorded-where" });
    const controls = make("div", { class: "recorded-controls", role: "group", "aria-label": "What is shown" },
      make("div", { class: "recorded-choices" }, P.box, D.box, K.box, T.box),
      make("div", { class: "recorded-steps" }, player, back, next, slider, where));

    const question = make("p", { class: "recorded-prompt", tabindex: 0, role: "group", "aria-label": "The draft and the prompt" });
    const status = make("p", { class: "recorded-status", role: "status" });
    const lanes = make("div", { class: "recorded-lanes" });
    const text = make("div", { class: "recorded-text", role: "toolbar", "aria-label": "The text so far. Arrow keys move from token to token" });
    const strip = make("div", { class: "recorded-strip", role: "toolbar", "aria-label": "This round's tokens. Arrow keys move from token to token" });
    const lens = make("div", { class: "recorded-lens", role: "region", "aria-label": "The token under the microscope" });
    const more = make("a", {}, "This run on its own page, with averages over many texts");
    const key = make("p", { class: "recorded-key" }, ...Object.entries(MEANING).flatMap(([status, words]) => [make("span", { class: `status-${status}`, title: words }, ` ${status} `), " "]),
      make("span", { class: "status-never", title: NEVER }, " never tried "));

    let drawnFor = null;
    const draw = () => {
      const run = find(at), rounds = run.rounds, n = at.round;
      P.set(at.prompt);
      D.set(at.draft);
      K.set(at.K);
      T.set(at.T);
      back.disabled = n === 0;
      next.disabled = n === rounds.length;
      slider.max = rounds.length;
      slider.value = n;
      where.textContent = n ? `round ${n} of ${rounds.length}` : "the prompt";
      slider.setAttribute("aria-valuetext", where.textContent);
      question.replaceChildren(make("strong", {}, "Draft: "), drafters[at.draft][1], ". ", make("strong", {}, "Prompt: "), prompts[at.prompt][1]);
      status.replaceChildren(...sentences(run, n));
      if (drawnFor !== run) {
        lay(run);
        measure(run);
      }
      drawnFor = run;
      light();
      fill(text, [[firstSpot(run)], ...rounds.slice(0, n).map(spots)], n, (spot) => spot.status !== "never");
      fill(strip, [n ? spots(rounds[n - 1]) : [firstSpot(run)]], n, () => true, n);
      lens.replaceChildren(...microscope(run, n));
      if (alone) averages.draw(at);
      else more.href = new URL(`recorded.html${address()}`, here);
    };

    // Tokens as buttons. One of a group is in the tab order; the arrows lead to the others.
    const fill = (box, parts, n, wanted, from = 0) => {
      const had = box.contains(document.activeElement);
      box.replaceChildren(...parts.map((part, r) => {
        const round = from + r, tokens = part.map((spot, j) => [spot, j]).filter(([spot]) => wanted(spot));
        return make("span", round === n ? { class: "recorded-now" } : {}, ...tokens.map(([spot, j]) => token(box, spot, round, j)));
      }));
      const chosen = box.querySelector("[aria-pressed=true]") || box.querySelector("button");
      chosen.tabIndex = 0;
      if (had) chosen.focus({ preventScroll: true });
    };
    const token = (box, spot, round, j) => {
      const words = data.tokens[spot.token], broken = !box.classList.contains("recorded-strip") && words.includes("\n") && spot.status !== "rejected";
      const made = make("button", {
        type: "button", tabindex: -1, class: `recorded-spot status-${spot.status}`, "data-round": round, "data-token": j,
        title: MEANING[spot.status] || NEVER, "aria-label": `${spelled(spot.token).trim() || "space"}: ${MEANING[spot.status] || NEVER}`,
        "aria-pressed": String(round === at.round && j === at.token),
      }, !box.classList.contains("recorded-strip") ? spelled(spot.token) : spelled(spot.token).replace(/^ /, "␣"));
      made.addEventListener("click", () => { play(false); go({ round, token: j }); });
      return broken ? make("span", {}, made, make("br")) : made;
    };
    for (const box of [text, strip]) {
      box.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const all = [...box.querySelectorAll("button")], to = all[all.indexOf(document.activeElement) + step];
        event.preventDefault();
        if (to) to.click();
      });
    }

    const sentences = (run, n) => {
      const total = run.rounds.length ? sum(run.rounds) : 0, whole = `${total + 1} tokens in ${plural(run.rounds.length, "round")}, ${(total / run.rounds.length).toFixed(2)} a round`;
      const note = make("span", { class: "recorded-count" }, `The whole run: ${whole}, for the first token comes with the prompt: the forward that reads the prompt already says what follows it.`);
      if (!n) return [`The target reads the prompt and says ${quote(run.first)}. No round has begun. `, note];
      const r = run.rounds[n - 1], own = quote(r.own);
      const ending = !r.draft.length ? `nothing was drafted; the target says ${own}.`
        : r.emitted <= r.accepted ? "the text ends inside the draft."
        : r.accepted === r.draft.length ? `${r.accepted === 1 ? "the drafted token is" : `all ${r.accepted} drafted tokens are`} accepted, and ${own} comes on top.`
        : `of ${plural(r.draft.length, "drafted token")}, ${r.accepted} accepted; then the target says ${own} in place of ${quote(r.draft[r.accepted])}.`;
      const soFar = sum(run.rounds.slice(0, n));
      return [`Round ${n}: ${ending} So far ${soFar + 1} tokens: the first with the prompt, ${soFar} in ${plural(n, "round")}, ${(soFar / n).toFixed(2)} a round. `, note];
    };

    // Both lanes on one axis of time. A box is a forward of the target, with the draft before it.
    let parts = {};
    const lay = (run) => {
      const plain = plainOf(at), longest = Math.max(run.ends.at(-1), plain.ends.at(-1));
      const lane = (name, kind, ends, tokens, colours) => {
        const written = make("span", { class: "recorded-clock" });
        const boxes = ends.map((end, i) => make("span", {
          class: `recorded-forward recorded-forward-${colours(i)}`, style: `left:${(100 * (i ? ends[i - 1] : 0)) / longest}%;width:${(100 * (end - (i ? ends[i - 1] : 0))) / longest}%`,
        }, tokens(i) > 1 ? String(tokens(i)) : ""));
        const cursor = make("span", { class: "recorded-cursor" });
        parts[kind] = { boxes, ends, tokens, written, cursor };
        return make("div", { class: `recorded-lane recorded-lane-${kind}` }, make("div", { class: "recorded-head" }, make("strong", {}, name), written),
          make("div", { class: "recorded-track", "aria-hidden": "true" }, ...boxes, cursor));
      };
      const every = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10].find((step) => longest / step <= 6) || 20;
      const ticks = Array.from({ length: Math.floor(longest / every) + 1 }, (_, i) => make("span", { style: `left:${(100 * i * every) / longest}%` }, `${+(i * every).toFixed(2)} s`));
      parts = {};
      const speculative = lane("Speculative decoding", "speculative", run.ends, (i) => (i ? run.rounds[i - 1].emitted : 1), (i) => (!i ? "prompt" : run.rounds[i - 1].accepted ? "kept" : "own"));
      const alone = lane("Plain decoding", "plain", plain.ends, () => 1, (i) => (i ? "own" : "prompt"));
      parts.longest = longest;
      const swatch = (kind, words) => make("span", {}, make("span", { class: `recorded-swatch recorded-forward-${kind}` }), words);
      lanes.replaceChildren(alone, speculative, make("div", { class: "recorded-axis", "aria-hidden": "true" }, ...ticks),
        make("p", { class: "recorded-legend" }, "A box is a forward of the target, with the draft before it: ", swatch("prompt", "it reads the prompt"), swatch("kept", "it kept guesses; the number says how many tokens came"), swatch("own", "one token")),
        make("p", { class: "recorded-verdict" }, `Seconds on ${data.threads === 1 ? "one core" : `${data.threads} cores`} of a CPU, medians of ${data.repeats} runs. ` +
          `Plain ${plain.ends.at(-1).toFixed(2)} s for ${plain.ends.length} tokens, speculative ${run.ends.at(-1).toFixed(2)} s for ${sum(run.rounds) + 1}: ${rate(plain.ends, plain.ends.length, run.ends, sum(run.rounds) + 1)}.`));
    };
    const rate = (a, tokensA, b, tokensB) => {
      const gain = tokensB / b.at(-1) / (tokensA / a.at(-1));
      return `${gain.toFixed(2)} × the tokens a second${gain < 1 ? ", slower than without drafts" : ""}`;
    };
    const light = () => {
      for (const kind of ["plain", "speculative"]) {
        const { boxes, ends, tokens, written, cursor } = parts[kind], done = ends.filter((end) => end <= clock + 1e-9).length;
        boxes.forEach((box, i) => {
          box.classList.toggle("recorded-done", i < done);
          box.classList.toggle("recorded-here", kind === "speculative" && i === at.round);
        });
        const said = ends.slice(0, done).reduce((total, _, i) => total + tokens(i), 0);
        written.textContent = `${plural(said, "token")}, ${plural(done, "forward")} at ${Math.min(clock, parts.longest).toFixed(2)} s`;
        cursor.style.left = `${(100 * Math.min(clock, parts.longest)) / parts.longest}%`;
      }
    };

    // Why a token met its status, in words.
    const why = (run, n, spot) => {
      if (!n) return "It comes with the prompt: the forward that reads the prompt ends in the distribution of the first token. No draft was asked, so nothing was compared.";
      if (spot.status === "never") return "A guess before it was rejected. It had been guessed for another text, and was thrown away untried.";
      const r = run.rounds[n - 1], [overlap] = r.positions[spot.i], greedy = run.temperature === 0;
      const meet = overlap === null || greedy ? "" : ` p and q overlap by ${digits(overlap)}: so often a guess is kept here.`;
      const sure = r.q[spot.i] === 1 ? "A sure draft, q = 1, is kept with chance p; by default the target's own draw decides. " : "";
      return {
        accepted: greedy ? "Temperature 0: it is the target's likeliest token, so it is kept; nothing is drawn." : `${sure}u is below min(1, p/q), so the guess is kept.`,
        rejected: greedy ? "Temperature 0: it is not the target's likeliest token, so it is rejected; nothing is drawn."
          : `${sure}u is not below min(1, p/q), so the guess is rejected. The residual, max(p − q, 0), decides what comes instead.`,
        corrected: greedy ? "Temperature 0: the target's likeliest token, in place of the guess."
          : `Drawn from the residual, max(p − q, 0), where its share is ${digits(r.chance)}. So the text stays distributed as p.`,
        bonus: `${r.accepted === 1 ? "The one guess was kept" : `All ${r.accepted} guesses were kept`}, and nothing was left to reject: one token more comes from p itself, of the same forward.`,
        target: "Nothing was drafted here: a plain step, and the token comes from p itself.",
      }[spot.status] + meet;
    };
    // One token: the numbers that decided on it, in words and side by side, and what p and q were there.
    const microscope = (run, n) => {
      const r = run.rounds[n - 1], spot = n ? spots(r)[at.token] : firstSpot(run), tried = n && spot.status !== "never";
      const number = (x) => (x === null || x === undefined ? "–" : digits(x));
      const [overlap, top] = tried ? r.positions[spot.i] : [null, []];
      const drafted = spot.status === "accepted" || spot.status === "rejected", mine = top.find(([token]) => token === spot.token) || [];
      const p = drafted ? r.p[spot.i] : mine[1], q = drafted ? r.q[spot.i] : overlap === null ? null : mine[2];
      const facts = [["p, target", p], ["q, draft", q], ["min(1, p/q)", drafted ? Math.min(1, p / q) : null],
        ["u, drawn", tried ? (drafted ? r.u[spot.i] : r.drawn) : null], ["residual", overlap === null ? null : Math.max(0, p - q)]];
      const scale = Math.max(...top.map(([, a, b]) => Math.max(a, b)));
      const rows = top.map(([token, ...three]) => {
        const [a, b] = drafted && token === spot.token ? [p, q] : three; // to four digits, as the facts above
        const pieces = overlap === null ? [["bonus", a]] : [["overlap", Math.min(a, b)], a > b ? ["residual", a - b] : ["excess", b - a]];
        const role = overlap !== null && token === r.draft[spot.i] ? "guessed" : token === r.own && spot.i === r.accepted ? "said" : "";
        const line = row(shown(token), bar(pieces, scale), digits(a), overlap === null ? "" : digits(b), role);
        if (token === spot.token) line.setAttribute("aria-current", "true");
        return line;
      });
      while (rows.length < ROWS) rows.push(row("\u00a0", "", "", "", "")); // the box keeps its height
      return [
        make("p", { class: "recorded-title" }, "Under the microscope: ", shown(spot.token), ", ", make("span", { class: `status-${spot.status}` }, spot.status === "never" ? "never tried" : spot.status)),
        make("dl", { class: "recorded-facts" }, ...facts.map(([name, x]) => make("div", { class: "recorded-fact" }, make("dt", {}, name), make("dd", {}, number(x))))),
        make("p", { class: "recorded-why", style: `min-height:${tallestWhy}px` }, why(run, n, spot)),
        table("The likeliest tokens here", ["token", "p and q", "p", "q", "role"], rows),
      ];
    };

    // Nothing moves while a reader steps: each part is as tall as it will need to be in this run.
    let tallestWhy = 0, measured = 0;
    const measure = (run) => {
      const tallest = (like, fillings) => {
        const copy = like.cloneNode(false);
        copy.removeAttribute("role");
        copy.removeAttribute("style");
        copy.classList.add("recorded-measure");
        root.append(copy);
        const most = Math.max(...fillings.map((each) => { each(copy); return Math.ceil(copy.getBoundingClientRect().height); }));
        copy.remove();
        return most;
      };
      const all = [...Array(run.rounds.length + 1).keys()], parts = all.map((n) => (n ? spots(run.rounds[n - 1]) : [firstSpot(run)]));
      status.style.minHeight = `${tallest(status, all.map((n) => (copy) => copy.replaceChildren(...sentences(run, n))))}px`;
      strip.style.minHeight = `${tallest(strip, all.map((n) => (copy) => fill(copy, [parts[n]], n, () => true, n)))}px`;
      text.style.minHeight = `${tallest(text, [(copy) => fill(copy, parts, all.length - 1, (spot) => spot.status !== "never")])}px`;
      const words = new Set(all.flatMap((n) => parts[n].map((spot) => why(run, n, spot))));
      tallestWhy = tallest(make("p", { class: "recorded-why" }), [...words].map((each) => (copy) => { copy.textContent = each; }));
      measured = root.clientWidth;
    };
    new ResizeObserver(() => {
      if (root.clientWidth === measured) return;
      measure(find(at));
      draw();
    }).observe(root);

    const averages = alone && averagesOf({ make, row, table, bar, plural, data });

    // Play: the run's own clock, slower. Whoever asked for less motion gets a round at a time.
    const end = () => find(at).ends.at(-1);
    const tick = (now) => {
      clock += Math.min(0.1, (now - last) / 1000) / SLOWER;
      last = now;
      const ends = find(at).ends, round = Math.max(0, ends.filter((e) => e <= clock).length - 1);
      if (round !== at.round) go({ round });
      else light();
      if (clock >= end()) return play(false);
      frame = requestAnimationFrame(tick);
    };
    const play = (on) => {
      if (on === playing) return;
      playing = on;
      player.textContent = on ? "Pause" : "Play";
      cancelAnimationFrame(frame);
      clearInterval(timer);
      if (!on) {
        clock = find(at).ends[at.round];
        return light();
      }
      if (at.round === find(at).rounds.length) {
        clock = 0;
        go({ round: 0 });
      }
      if (still.matches) {
        timer = setInterval(() => {
          clock = find(at).ends[Math.min(at.round + 1, find(at).rounds.length)];
          go({ round: at.round + 1 });
          if (at.round === find(at).rounds.length) play(false);
        }, STEP);
      } else {
        last = performance.now();
        frame = requestAnimationFrame(tick);
      }
    };

    // The opening round, in six captions.
    const guide = make("section", { class: "recorded-guide", "aria-label": "One round, explained in six captions" });
    const reopen = button("explain", "Explain a round", () => tour(0, true));
    const captions = () => {
      const r = find(at).rounds[at.round - 1], n = r.draft.length, i = r.accepted, share = (j) => Math.min(1, r.p[j] / r.q[j]), ratio = (j) => digits(share(j));
      const least = r.draft.slice(0, i).reduce((found, _, j) => (share(j) < share(found) ? j : found), 0); // what was kept with the least chance says most
      return [
        ["The draft guesses", `Something cheap, here ${drafters[at.draft][0]}, has guessed ${n} tokens. They stand in one row, with what became of each.`, strip, i],
        ["The target reads all guesses at once", "One forward of the target, in the framed box on the lower lane, gives p for every guess. It takes little longer than the forward for one token.", lanes, i],
        ["Each guess is kept or not", `From the left: a guess is kept if a random number u is below min(1, p/q). For ${quote(r.draft[least])}, p = ${digits(r.p[least])} and q = ${digits(r.q[least])}; ${digits(r.u[least])} is below ${ratio(least)}: kept.`, lens, least],
        ["The first that fails", `For ${quote(r.draft[i])}, ${digits(r.u[i])} is not below ${ratio(i)}: rejected, and every guess after it is thrown away untried.`, lens, i],
        ["Another in its place", `The same forward says what comes instead: ${quote(r.own)}, drawn from the residual, max(p − q, 0). Had all guesses stood, it would have given one token on top, the bonus.`, lens, i + 1],
        ["Count", `${i + 1} tokens from one forward; plain decoding, on the upper lane, makes ${i + 1} forwards of them. And the text is distributed just as without drafts. Now press Step, Play, or any token.`, lanes, i + 1],
      ];
    };
    // Bring a part into view, below the guide, which stays at the top while it is open.
    const reveal = (part) => {
      part.style.scrollMarginTop = `${guide.offsetHeight + 16 + (parseFloat(getComputedStyle(guide).top) || 0)}px`;
      const { top, bottom } = part.getBoundingClientRect();
      if (top < parseFloat(part.style.scrollMarginTop) - 8 || bottom > innerHeight) part.scrollIntoView({ block: "start", behavior: still.matches ? "instant" : "smooth" });
    };
    const tour = (i, focus = false) => {
      play(false);
      guided = i !== null;
      root.classList.toggle("recorded-guided", guided);
      root.classList.toggle("recorded-led", guided && focus); // then it stays in sight, beside what it speaks of
      for (const each of [strip, lanes, lens]) each.classList.remove("recorded-shown");
      if (i === null) {
        guide.replaceChildren(reopen);
        guide.classList.add("recorded-closed");
        if (focus) reopen.focus();
        return;
      }
      guide.classList.remove("recorded-closed");
      at = opening; // the round the captions speak of
      const told = captions(), [title, words, about, token] = told[i], final = i === told.length - 1;
      at = { ...at, token };
      clock = find(at).ends[at.round];
      draw();
      about.classList.add("recorded-shown");
      const before = button("guide-back", "Back", () => tour(i - 1, true)), onward = button("guide-next", final ? "Done" : "Next", () => tour(final ? null : i + 1, true));
      before.disabled = i === 0;
      guide.replaceChildren(make("p", { class: "recorded-caption", "aria-live": "polite" }, make("strong", {}, `${i + 1} of ${told.length}. ${title}. `), words),
        make("div", { class: "recorded-guide-buttons" }, before, onward, button("guide-close", "Close", () => tour(null, true))));
      if (!focus) return;
      onward.focus({ preventScroll: true });
      reveal(about);
    };
    guide.addEventListener("keydown", (event) => {
      const press = { ArrowRight: ".recorded-guide-next", ArrowLeft: ".recorded-guide-back:enabled", Escape: ".recorded-guide-close" }[event.key];
      const found = press && guide.querySelector(press);
      if (!found) return;
      event.preventDefault();
      found.click();
    });
    window.addEventListener("hashchange", () => {
      const asked = read();
      if (!asked) return;
      tour(null);
      go(asked);
    });

    root.replaceChildren(make("div", { class: "recorded-stage" }, guide, controls, question, status, lanes, text, strip, key, lens),
      ...(alone ? averages.parts : [make("p", { class: "recorded-more" }, more)]));
    root.dataset.ready = "true"; // the box has its own measures from here on
    const asked = read();
    at = asked || opening;
    clock = find(at).ends[at.round];
    draw();
    tour(asked ? null : 0);
  };

  const failed = (root) => root.append(make("p", { role: "status" },
    "The recorded runs could not be loaded, so this is a picture of one of them. A browser loads them from a file server, not from a folder."));
  const averagesOf = (root) => root.dataset.alone === "true" && import(new URL("recorded_averages.js", here)).then((module) => module.default);
  const style = make("link", { rel: "stylesheet", href: new URL("recorded.css", here) });
  const styled = new Promise((done) => style.addEventListener("load", done)); // the box is measured
  document.head.append(style);
  const load = (root) => Promise.all([fetch(root.dataset.runs).then((answer) => answer.json()), averagesOf(root), styled]).then(([data, averages]) => start(root, data, averages), () => failed(root));
  // The data come when a reader comes near, for most of a page may stand before the box.
  const near = new IntersectionObserver((seen) => {
    for (const { target } of seen.filter((each) => each.isIntersecting)) {
      near.unobserve(target);
      load(target);
    }
  }, { rootMargin: "1200px" });
  for (const root of document.querySelectorAll(".recorded")) near.observe(root);
})();
