// Rounds, token by token: what became of each draft token, why, and p, q and the residual at its place, as tables and bars.
const ROWS = 6; // of a table

export const MEANING = {
  target: "the target's own token", accepted: "draft token, accepted", rejected: "draft token, rejected: not in the text",
  corrected: "the target's token in place of the rejected one", bonus: "the target's token after a fully accepted draft",
  never: "draft token, never tried: one before it was rejected",
};

export const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
export const spelled = (text) => text.replaceAll("\n", "⏎");
export const visible = (text) => spelled(text).replace(/^ /, "␣");
const digits = (x) => (x === null || x === undefined ? "–" : x >= 0.9995 ? "1" : x < 0.0005 && x > 0 ? "<0.001" : x === 0 ? "0" : x.toFixed(3));
const shown = (text) => make("span", { class: "live-token" }, visible(text));

// What became of each token of a round, in the order of the draft.
export const spots = (r) => {
  const failed = r.drafts.findIndex((draft) => !draft.accepted);
  const found = r.drafts.map((draft, i) => ({ ...draft, i, status: failed < 0 || i < failed ? "accepted" : i === failed ? "rejected" : "never" }));
  const inside = failed < 0 ? found.length : failed;
  if (!r.token || r.emitted?.length <= inside) return found.slice(0, r.emitted?.length ?? inside); // the text ends inside the draft
  const status = r.token.kind === "plain" ? "target" : r.token.kind, place = status === "corrected" ? failed : found.length;
  found.splice(status === "corrected" ? place + 1 : place, 0, { ...r.token, i: place, status });
  return found;
};
export const stays = (spot) => spot.status !== "rejected" && spot.status !== "never";

const drawn = (spot) => spot.u !== null && spot.u !== undefined;
const why = (spot, greedy) => ({
  accepted: greedy ? "Temperature 0: it is the target’s likeliest token, so it is kept; nothing is drawn." : "u is below min(1, p/q), so the draft token is kept.",
  rejected: greedy ? "Temperature 0: it is not the target’s likeliest token, so it is rejected; nothing is drawn." : "u is not below min(1, p/q), so it is rejected. The residual, max(p − q, 0), decides what comes instead.",
  never: "A token before it was rejected. It was drafted for a text that did not come about, so it is thrown away untried: its draft and its row of the forward bought nothing.",
  corrected: greedy ? "Temperature 0: the target’s likeliest token, in place of the draft token." : "Drawn from the residual, max(p − q, 0): what p has left over where the draft says a token too seldom. So the text stays distributed as p.",
  bonus: "The whole draft was kept, and the same forward says what follows it: one token more, from p itself.",
  target: "Nothing was drafted here: a plain step, and the token comes from p itself.",
}[spot.status]);

const bar = (parts, scale) => make("span", { class: "live-bar", "aria-hidden": "true" },
  ...parts.filter(([, size]) => size > 0).map(([kind, size]) => make("span", { class: `live-${kind}`, style: `width:${(100 * size) / scale}%` })));
const line = (...cells) => make("tr", {}, ...cells.map((cell, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, cell)));

// The likeliest tokens at a place, each with its p, its q and its share of the residual.
const likeliest = (spot, isDraft, around) => {
  const found = new Map(), top = spot.top || (spot.status === "corrected" && around ? around.top : null);
  const put = (list, name) => { for (const [id, words, x] of list || []) found.set(id, { id, words, p: 0, q: 0, rest: 0, ...found.get(id), [name]: x }); };
  put(top?.p, "p");
  put(top?.q, "q");
  put(spot.residual, "rest");
  found.set(spot.id, { p: spot.p ?? 0, q: (isDraft && spot.q) || 0, rest: 0, ...found.get(spot.id), id: spot.id, words: spot.text });
  const list = [...found.values()].sort((a, b) => Math.max(b.p, b.q, b.rest) - Math.max(a.p, a.q, a.rest));
  return list.filter((one, i) => i < ROWS - 1 || one.id === spot.id).slice(0, ROWS);
};

// One token: the numbers that decided on it, in words and side by side, and what p and q were there.
export const microscope = (r, j, greedy) => {
  const spot = spots(r)[j], isDraft = ["accepted", "rejected", "never"].includes(spot.status), tried = spot.status !== "never";
  const around = isDraft ? spot : r.drafts[spot.i] || null, compared = isDraft || spot.status === "corrected";
  const list = tried ? likeliest(spot, isDraft, around) : [], share = list.find((one) => one.id === spot.id);
  const facts = [["p, target", tried ? spot.p : null], ["q, draft", isDraft ? spot.q : null], ["min(1, p/q)", isDraft && tried ? Math.min(1, spot.p / spot.q) : null],
    ["u, drawn", tried && drawn(spot) ? spot.u : null], ["residual", spot.residual ? share.rest : isDraft && tried ? Math.max(0, spot.p - spot.q) : null]];
  const most = Math.max(...list.map((one) => Math.max(one.p, one.q)), 1e-9);
  const lines = list.map((one) => {
    const parts = compared ? [["overlap", Math.min(one.p, one.q)], one.p > one.q ? ["residual", one.p - one.q] : ["excess", one.q - one.p]] : [["bonus", one.p]];
    const role = one.id === spot.id ? (isDraft ? "draft" : "said") : !isDraft && around && one.id === around.id ? "rejected" : "";
    const made = line(shown(one.words), bar(parts, most), digits(one.p), compared ? digits(one.q) : "", spot.residual ? digits(one.rest) : "", role);
    if (one.id === spot.id) made.setAttribute("aria-current", "true");
    return made;
  });
  while (lines.length < ROWS) lines.push(line("\u00a0", "", "", "", "", "")); // the box keeps its height
  const heads = ["token", "p and q", "p", "q", "rest", "role"].map((head) => make("th", { scope: "col" }, head));
  return [
    make("p", { class: "live-title" }, "Under the microscope: ", shown(spot.text), ", ", make("span", { class: `status-${spot.status}` }, tried ? spot.status : "never tried")),
    make("dl", { class: "live-facts" }, ...facts.map(([name, x]) => make("div", { class: "live-fact" }, make("dt", {}, name), make("dd", {}, digits(x))))),
    make("p", { class: "live-why" }, why(spot, greedy)),
    make("table", {}, make("caption", {}, tried ? "The likeliest tokens here" : "Nothing was compared here"), make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines)),
  ];
};
