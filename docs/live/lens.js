// Rounds, token by token: what became of each draft token, and how the target chose its own at that place, as tables and bars.
const ROWS = 6; // of a table

export const MEANING = {
  target: "the target's own token", accepted: "draft token, accepted", rejected: "draft token, rejected: not in the text",
  corrected: "the target's token in place of the rejected one", bonus: "the target's token after a fully accepted draft",
  never: "draft token, never tried: one before it was rejected, or ended the text",
};

export const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
export const spelled = (text) => text.replaceAll("\n", "⏎");
export const visible = (text) => spelled(text).replace(/^ /, "␣");
const digits = (x) => (x >= 0.9995 ? "1" : x < 0.0005 && x > 0 ? "<0.001" : x === 0 ? "0" : x.toFixed(3));
const shown = (text) => make("span", { class: "live-token" }, visible(text));

// What became of each token of a round, in the order of the draft.
export const spots = (r) => {
  const failed = r.drafts.findIndex((draft) => !draft.accepted);
  const found = r.drafts.map((draft, i) => ({ ...draft, i, status: failed < 0 || i < failed ? "accepted" : i === failed ? "rejected" : "never" }));
  const inside = failed < 0 ? found.length : failed;
  if (!r.token || r.emitted?.length <= inside) { // the text ends inside the draft
    const end = r.emitted?.length ?? inside;
    return found.map((spot) => (spot.i < end ? spot : { ...spot, status: "never" }));
  }
  const status = r.token.kind === "plain" ? "target" : r.token.kind, place = status === "corrected" ? failed : found.length;
  found.splice(status === "corrected" ? place + 1 : place, 0, { ...r.token, i: place, status });
  return found;
};
export const stays = (spot) => spot.status !== "rejected" && spot.status !== "never";

const own = (spot) => (spot.own === undefined ? spot : spot.own); // what the target chose at its place; null: never asked
const why = (spot, greedy) => ({
  accepted: greedy ? "Temperature 0: it is the target’s likeliest token, so it is kept; nothing is drawn." : "The target draws a token of its own, as it would without a draft: u falls on the draft token. They agree, so it is kept.",
  rejected: greedy ? "Temperature 0: it is not the target’s likeliest token, so it is rejected; nothing is drawn." : "The target draws a token of its own, as it would without a draft: u falls on another one. That one comes, and the draft ends here.",
  never: "A token before it was rejected, or ended the text. It was drafted for a text that did not come about, so it is thrown away untried: its draft and its row of the forward bought nothing.",
  corrected: greedy ? "Temperature 0: the target’s likeliest token, in place of the draft token." : "Drawn by the target, as it would be without a draft; the draft had said another one.",
  bonus: greedy ? "The whole draft was kept, and the same forward says what follows it: one token more." : "The whole draft was kept, and the same forward says what follows it: one token more, drawn as without a draft.",
  target: greedy ? "Nothing was drafted here: a plain step, and the target’s likeliest token." : "Nothing was drafted here: a plain step, drawn by the target.",
}[spot.status]);

const line = (...cells) => make("tr", {}, ...cells.map((cell, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, cell)));

// The likeliest tokens at a place, with those that matter there: the draft token and the target's own.
const likeliest = ({ top }, matter) => {
  const rest = top.filter(([id]) => !matter.some((one) => one.id === id)).map(([id, text, p]) => ({ id, text, p }));
  return [...matter, ...rest].slice(0, ROWS).sort((a, b) => b.p - a.p);
};

// One token: how the target's own token was chosen at its place, and whether the draft agrees.
export const microscope = (r, j, greedy) => {
  const spot = spots(r)[j], target = own(spot), draft = r.drafts[spot.i], agrees = draft && target && draft.id === target.id;
  const matter = !target ? [] : draft && !agrees ? [target, draft] : [target], list = target ? likeliest(target, matter) : [];
  const says = greedy ? "likeliest" : "drawn", drew = !greedy && target;
  const facts = [["p, this token", target && digits(spot.p)], ["u, from the seed", drew && digits(target.u)], ["u falls within", drew && `${digits(target.from)}–${digits(target.to)}`],
    [greedy ? "target’s likeliest" : "target drew", target && shown(target.text)], ["draft agrees", draft && target && (agrees ? "yes" : "no")]];
  const told = facts.filter(([, x]) => x);
  const lines = list.map((one) => {
    const bar = make("span", { class: "live-bar", "aria-hidden": "true" }, make("span", { class: "live-p", style: `width:${(100 * one.p) / list[0].p}%` }));
    const made = line(shown(one.text), bar, digits(one.p), [one.id === draft?.id && "draft", one.id === target.id && says].filter(Boolean).join(", "));
    if (one.id === spot.id) made.setAttribute("aria-current", "true");
    return made;
  });
  while (lines.length < ROWS) lines.push(line("\u00a0", "", "", "")); // the box keeps its height
  const heads = ["token", "how likely", "p", "role"].map((head) => make("th", { scope: "col" }, head));
  return [
    make("p", { class: "live-title" }, "Under the microscope: ", shown(spot.text), ", ", make("span", { class: `status-${spot.status}` }, target ? spot.status : "never tried")),
    make("dl", { class: "live-facts" }, ...(greedy ? told : facts).map(([name, x]) => make("div", { class: "live-fact" }, make("dt", {}, name), make("dd", {}, x || "–")))),
    make("p", { class: "live-why" }, why(spot, greedy)),
    ...(greedy ? ["At temperature 0 nothing but the likeliest token counts, so its p is 1. Run at temperature 1 to see how likely each was."].map((words) => make("p", { class: "live-offer" }, words)) : [make("table", {}, make("caption", {}, target ? "The likeliest tokens here" : "Nothing was compared here"), make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines))]),
  ];
};
