// Steps through recorded runs without a kernel. data/recorded.json holds what the package's own loop did (tools/record.py
// wrote it); nothing is decided here, only looked up, counted and drawn. Without this script a picture stays in its place.
(() => {
  "use strict";
  const MEANING = {
    target: "the target's own token", accepted: "draft token, accepted", rejected: "draft token, rejected: not in the text",
    replacement: "the target's token in place of the rejected one", bonus: "the target's token after a fully accepted draft",
  };
  const TAG = { rejected: "del", replacement: "ins" };

  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const digits = (x) => (x >= 0.9995 ? "1" : x < 0.0005 && x > 0 ? "<0.001" : x === 0 ? "0" : x.toFixed(3));
  const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  const mean = (rounds) => rounds.reduce((sum, r) => sum + r.emitted.length, 0) / rounds.length;

  // What became of each token of a round, in the order of the text, as the package's Round.fates tells it.
  const fates = (round) => {
    const found = [];
    round.emitted.forEach((token, i) => {
      if (i < round.accepted) found.push([token, "accepted"]);
      else if (!round.draft.length) found.push([token, "target"]);
      else if (round.accepted === round.draft.length) found.push([token, "bonus"]);
      else found.push([round.draft[i], "rejected"], [token, "replacement"]);
    });
    return found;
  };

  // A native range with a label that says its value in words.
  let count = 0;
  const slider = (name, onInput) => {
    const id = `recorded-${count++}`, value = make("output", { for: id }), label = make("label", { for: id }, `${name}: `, value);
    const input = make("input", { type: "range", id, min: 0, max: 0, step: 1, value: 0 });
    input.addEventListener("input", onInput);
    const set = (at, last, words) => {
      input.max = last;
      input.value = at;
      input.disabled = last === 0;
      input.setAttribute("aria-valuetext", words);
      value.textContent = words;
    };
    return { box: make("div", { class: "recorded-slider" }, label, input), at: () => Number(input.value), set };
  };

  const bar = (parts, scale) => make("span", { class: "recorded-bar", "aria-hidden": "true" },
    ...parts.map(([kind, size]) => make("span", { class: `recorded-${kind}`, style: `width:${(100 * size) / scale}%` })));
  const row = (...cells) => make("tr", {}, ...cells.map((cell, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, cell)));
  const table = (caption, heads, rows) => make("table", {}, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, ...rows));

  const start = (root, data) => {
    const quote = (token) => `“${data.tokens[token].replaceAll("\n", "⏎").trim() || "␣"}”`;
    const shown = (token) => make("span", { class: "recorded-token" }, data.tokens[token].replaceAll("\n", "⏎").replace(/^ /, "␣"));
    const find = (drafter, t, k) => data.runs.find((run) => run.drafter === drafter && run.temperature === data.temperatures[t] && run.K === data.Ks[k]);

    const menu = make("select", { id: "recorded-drafter" }, ...Object.entries(data.drafters).map(([name, words]) => make("option", { value: name }, words)));
    const K = slider("K, draft tokens per round", () => draw("run"));
    const T = slider("Temperature", () => draw("run"));
    const at = slider("Round", () => draw("round"));
    const place = slider("Draft position", () => draw("place"));
    const status = make("p", { class: "recorded-status", role: "status" });
    const text = make("div", { class: "recorded-text", role: "group", "aria-label": "The text so far, each token marked with its fate" });
    const steps = make("div", { class: "recorded-table" }), lens = make("div", { class: "recorded-table" }), run = make("div", { class: "recorded-pair" });
    menu.addEventListener("change", () => draw("run"));

    const draw = (changed) => {
      const now = find(menu.value, T.at(), K.at()), rounds = now.rounds;
      K.set(K.at(), data.Ks.length - 1, String(data.Ks[K.at()]));
      T.set(T.at(), data.temperatures.length - 1, now.temperature === 0 ? "0 (greedy)" : String(now.temperature));
      const n = Math.min(at.at(), rounds.length - 1), round = rounds[n];
      at.set(n, rounds.length - 1, `${n + 1} of ${rounds.length}`);
      const last = round.positions.length - 1, i = changed === "place" ? Math.min(place.at(), last) : Math.min(round.accepted, last);
      place.set(i, last, `${i + 1} of ${last + 1}`);
      status.textContent = sentence(now, n, round);
      text.replaceChildren(...written(now, n));
      steps.replaceChildren(decisions(round));
      lens.replaceChildren(...microscope(round, i));
      run.replaceChildren(byPosition(now), byK(now));
    };

    const sentence = (now, n, round) => {
      const own = quote(round.own), tokens = 1 + until(now, n).reduce((sum, r) => sum + r.emitted.length, 0);
      const ending = !round.draft.length ? `Nothing was drafted; the target says ${own}.`
        : round.emitted.length <= round.accepted ? "The text ends inside the draft."
        : round.accepted === round.draft.length ? `${round.accepted === 1 ? "The drafted token is" : `All ${round.accepted} drafted tokens are`} accepted, and ${own} comes on top.`
        : `Of ${plural(round.draft.length, "drafted token")}, ${round.accepted} accepted; then the target says ${own} in place of ${quote(round.draft[round.accepted])}.`;
      return `Round ${n + 1}: ${ending} So far ${tokens} tokens from ${n + 2} forwards of the target.`;
    };
    const until = (now, n) => now.rounds.slice(0, n + 1);

    const written = (now, n) => [[[now.first, "target"]], ...until(now, n).map(fates)].map((part, i) =>
      make("span", i === n + 1 ? { class: "recorded-now" } : {}, ...part.map(([token, fate]) => {
        const words = data.tokens[token];
        return make(TAG[fate] || "span", { class: `fate-${fate}`, title: MEANING[fate] },
          fate === "target" ? words : words.replaceAll("\n", fate === "rejected" ? "⏎" : "⏎\n"));
      })));

    // The numbers that decided: chance = min(1, p/q), accepted if the uniform u is smaller.
    const decisions = (round) => {
      const rows = round.draft.map((token, i) => {
        if (i >= round.p.length) return row(shown(token), "", "", "", "", "never tried");
        const chance = Math.min(1, round.p[i] / round.q[i]), fate = i < round.accepted ? "accepted" : "rejected";
        return row(shown(token), digits(round.q[i]), digits(round.p[i]), digits(chance), round.u.length ? digits(round.u[i]) : "none", make("span", { class: `fate-${fate}` }, fate));
      });
      if (round.emitted.length > round.accepted) {
        const fate = !round.draft.length ? "target" : round.accepted === round.draft.length ? "bonus" : "replacement";
        rows.push(row(shown(round.own), "", "", digits(round.chance), round.drawn === null ? "none" : digits(round.drawn), make("span", { class: `fate-${fate}` }, fate)));
      }
      return table("This round, token by token", ["token", "q", "p", "chance", "u", "fate"], rows);
    };

    // One position: where p and q overlap, what q has too much of, and what only p has: the residual.
    const microscope = (round, i) => {
      const { overlap, top } = round.positions[i], scale = Math.max(...top.map(([, p, q]) => Math.max(p, q)));
      const rows = top.map(([token, p, q]) => {
        const parts = overlap === null ? [["bonus", p]] : [["overlap", Math.min(p, q)], p > q ? ["residual", p - q] : ["excess", q - p]];
        const role = overlap !== null && token === round.draft[i] ? "drafted" : token === round.own && i === round.accepted ? "said" : "";
        return row(shown(token), bar(parts, scale), digits(p), overlap === null ? "" : digits(q), role);
      });
      const words = overlap === null
        ? "Nothing was left to reject: the target's token comes from p itself."
        : `Here p and q overlap by ${digits(overlap)}. That share of all guesses from q is accepted; the other ${digits(Math.max(0, 1 - overlap))} is made up for from the residual.`;
      const key = overlap === null ? [] : [make("p", { class: "recorded-key" },
        make("span", { class: "recorded-overlap" }), " min(p, q)  ", make("span", { class: "recorded-residual" }), " residual, p − q  ", make("span", { class: "recorded-excess" }), " too much, q − p")];
      return [make("p", {}, words), ...key, table("The likeliest tokens at this position", ["token", "p and q", "p", "q", ""], rows)];
    };

    const byPosition = (now) => {
      const rows = Array.from({ length: now.K }, (_, i) => {
        const tried = now.rounds.filter((r) => i < r.p.length).length, kept = now.rounds.filter((r) => i < r.accepted).length;
        return row(String(i + 1), bar([["overlap", tried ? kept / tried : 0]], 1), tried ? `${kept} of ${tried}` : "never tried");
      });
      return table("Accepted when tried, by draft position", ["position", "share", "accepted"], rows);
    };
    const byK = (now) => {
      const runs = data.Ks.map((k, i) => find(now.drafter, T.at(), i)), most = Math.max(...runs.map((r) => mean(r.rounds)));
      const rows = runs.map((r) => {
        const line = row(String(r.K), bar([["bonus", mean(r.rounds)]], most), mean(r.rounds).toFixed(2));
        if (r.K === now.K) line.setAttribute("aria-current", "true");
        return line;
      });
      return table("Tokens per round, by K", ["K", "τ", "tokens"], rows);
    };

    root.replaceChildren(
      make("p", { class: "recorded-prompt" }, make("strong", {}, "Prompt: "), data.prompt),
      make("div", { class: "recorded-controls" },
        make("div", { class: "recorded-slider" }, make("label", { for: "recorded-drafter" }, "Draft"), menu), K.box, T.box, at.box),
      status, text,
      make("p", { class: "recorded-key" }, ...Object.entries(MEANING).flatMap(([fate, words]) => [make("span", { class: `fate-${fate}`, title: words }, ` ${fate} `), " "])),
      steps, place.box, lens, run);
    T.set(2, data.temperatures.length - 1, "");
    K.set(3, data.Ks.length - 1, "");
    at.set(2, 1000, "");
    draw("run");
    root.dataset.ready = "true";
  };

  const failed = (root) => root.append(make("p", { role: "status" },
    "The recorded runs could not be loaded, so this is a picture of one of them. A browser loads them from a file server, not from a folder."));
  for (const root of document.querySelectorAll(".recorded")) {
    fetch(root.dataset.runs).then((answer) => answer.json()).then((data) => start(root, data), () => failed(root));
  }
})();
