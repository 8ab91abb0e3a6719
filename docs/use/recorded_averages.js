// The averages below the recorded runs, with their spread: nothing of them depends on the run above but the choices.
// recorded.js loads this where the runs are what the page is about.
export default ({ make, row, table, bar, plural, data }) => {
  const { averages: over, drafters } = data.settings;
  const charts = make("div", { class: "recorded-charts" });
  const cell = (draft, prompt, temperature, k) => data.cells.find((c) => c.drafter === draft && c.prompt === prompt && c.temperature === temperature && c.K === k);
  let drawnFor = "", at = {};
  const draw = (state) => {
    at = state;
    const now = [at.draft, at.prompt, at.T, at.K].join();
    if (now === drawnFor) return;
    drawnFor = now;
    const along = (xs, get, what) => (prompt) => xs.map((x) => get(x, prompt)[what]);
    const ofK = (k, prompt) => cell(at.draft, prompt, at.T, k), ofT = (t, prompt) => cell(at.draft, prompt, t, at.K);
    const ks = over.Ks, ts = over.temperatures, name = drafters[at.draft][0];
    charts.replaceChildren(
      chart(`Tokens a round, by K, at temperature ${at.T}`, "K", ks, along(ks, ofK, "tau"), at.K, "τ", 1),
      chart(`Tokens a round, by temperature, at K = ${at.K}`, "temperature", ts, along(ts, ofT, "tau"), at.T, "τ", 1),
      chart(`Share of tried guesses kept, by temperature, K = ${at.K}`, "temperature", ts, along(ts, ofT, "alpha"), at.T, "share", 0, 1),
      positions());
    const here = ofK(at.K, "all");
    summary.textContent = `Draft: ${name}. At K = ${at.K} and temperature ${at.T}: ${here.tau[0].toFixed(2)} tokens a round on average` +
      `${here.tau[1] === null ? "" : ` (standard error ${here.tau[1].toFixed(2)})`}, over ${here.texts} texts of ${over.tokens} tokens: ` +
      `${at.T ? `${over.texts} seeds of each of ${plural(over.prompts.length, "prompt")}` : `one of each of ${plural(over.prompts.length, "prompt")}, as greedy text has no seed`}. Eight of ten texts lie between ${here.tau[2].toFixed(2)} and ${here.tau[3].toFixed(2)}.`;
    numbers.replaceChildren(table("Tokens a round, over all prompts", ["K", ...ts.map((t) => `T = ${t}`)], ks.map((k) => row(String(k), ...ts.map((t) => {
      const { tau } = cell(at.draft, "all", t, k);
      return `${tau[0].toFixed(2)}${tau[1] === null ? "" : ` ± ${tau[1].toFixed(2)}`} (${tau[2].toFixed(1)}–${tau[3].toFixed(1)})`;
    })))));
  };
  const summary = make("p", { class: "recorded-summary" }), numbers = make("div", { class: "recorded-table", tabindex: 0, role: "region", "aria-label": "The averages as a table" });

  // A line with its error bars, the band of eight in ten texts, and the chosen prompt alone, dashed.
  const chart = (title, xName, xs, values, here, yName, low, most) => {
    const all = values("all"), one = values(at.prompt), [W, H, left, bottom] = [340, 220, 34, 34];
    const high = most || Math.ceil(2 * Math.max(...all.filter(Boolean).map((v) => v[3]), ...one.filter(Boolean).map((v) => v[0]))) / 2;
    const X = (x) => left + ((x - xs[0]) / (xs.at(-1) - xs[0])) * (W - left - 14), Y = (y) => H - bottom - ((y - low) / (high - low)) * (H - bottom - 26);
    const there = xs.map((x, i) => [x, all[i]]).filter(([, v]) => v), path = (points) => `M${points.map(([x, y]) => `${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("L")}`;
    const ticks = most ? [0, .25, .5, .75, 1] : Array.from({ length: Math.floor(high - low) + 1 }, (_, i) => low + i);
    const label = (x, y, words, anchor, extra = {}) => make("text", { x, y, "text-anchor": anchor, ...extra }, words);
    const picture = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}. Average over all prompts, and in brackets where eight of ten texts lie: ${there.map(([x, v]) => `${xName} ${x}: ${v[0].toFixed(2)} (${v[2].toFixed(2)} to ${v[3].toFixed(2)})`).join("; ")}.` },
      ...ticks.map((y) => make("g", {}, make("line", { class: "recorded-grid", x1: left, x2: W - 14, y1: Y(y), y2: Y(y) }), label(left - 6, Y(y) + 4, String(y), "end"))),
      ...xs.map((x) => label(X(x), H - bottom + 16, String(x), "middle", x === here ? { class: "recorded-chosen" } : {})),
      label((left + W) / 2, H - 4, xName, "middle"), label(4, 12, yName, "start"),
      make("path", { class: "recorded-band", d: `${path(there.map(([x, v]) => [x, v[3]]))}L${path(there.map(([x, v]) => [x, v[2]]).reverse()).slice(1)}Z` }),
      make("path", { class: "recorded-one", d: path(xs.map((x, i) => [x, one[i]]).filter(([, v]) => v).map(([x, v]) => [x, v[0]])) }),
      ...there.filter(([, v]) => v[1] !== null).map(([x, v]) => make("line", { class: "recorded-error", x1: X(x), x2: X(x), y1: Y(Math.min(high, v[0] + 2 * v[1])), y2: Y(Math.max(low, v[0] - 2 * v[1])) })),
      make("path", { class: "recorded-mean", d: path(there.map(([x, v]) => [x, v[0]])) }),
      ...there.map(([x, v]) => make("circle", { class: x === here ? "recorded-dot recorded-chosen" : "recorded-dot", cx: X(x), cy: Y(v[0]), r: x === here ? 5 : 3 })));
    return make("figure", {}, make("figcaption", {}, title), picture);
  };
  const positions = () => {
    const found = cell(at.draft, "all", at.T, at.K), rows = Array.from({ length: at.K }, (_, i) => {
      const tried = found.tried[i], kept = found.kept[i];
      return row(String(i + 1), bar([["overlap", tried ? kept / tried : 0]], 1), tried ? `${kept} of ${tried}` : "never tried");
    });
    return make("figure", {}, table("Kept when tried, by draft position, in all texts", ["position", "share", "kept"], rows));
  };

  return {
    draw,
    parts: [
      make("p", { class: "recorded-heading" }, "Not one text, but many"), summary, charts,
      make("p", { class: "recorded-key" }, "Line: the average, with two standard errors up and down; they are long at temperature 0, where a prompt has one text only. Band: eight of ten texts. Dashed: the prompt chosen above, alone."),
      make("details", {}, make("summary", {}, "The averages as a table"), numbers),
    ],
  };
};
