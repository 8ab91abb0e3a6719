// A real model in the page: the default model writes with drafts and without them, and every number that decided on a token
// can be looked at. worker.js computes; here it is only asked, counted and drawn. Nothing of the model is fetched before a
// click: until then recorded.json stands there, a run of this page (tools/live.py took it). Without this script a picture
// stays in its place.
import { engineAt, failure, joined } from "./client.js";
import { MEANING, make, microscope, spelled, spots, stays, visible } from "./lens.js";

const MODEL = { name: "SmolLM2-135M-Instruct", megabytes: 98, head: 20, parts: 12 }; // what a click fetches: a test weighs it
const KEPT = /^specdec-live-/; // how the engine calls what the browser keeps
const MOST_K = 8, LONGEST = 128;
const LIST = "1. Wash the lettuce and the tomatoes.\n2. Cut the tomatoes into small pieces.\n3. Mix oil, vinegar, salt and pepper.\n4. Pour the dressing over the salad.";
const PROMPTS = [ // name, why drafts win there or don't, text
  ["A list, copied: here drafts win", "The answer stands in the prompt, so lookup finds long drafts; at temperature 0 nearly all of them are right.", `Write this list once more, exactly as it is, nothing else:\n\n${LIST}`],
  ["A class in Python", "Code repeats its own names: lookup finds something now and then, the head more often.", "Write a Python class Stack with the methods push, pop and peek, and show how to use it."],
  ["A story: little to look up", "Nothing in it was said before, so drafts are short and mostly wrong.", "Tell me a short story about a lighthouse keeper who finds a letter."],
  ["Your own", "Drafts win where the answer repeats what was said.", ""],
];
const DRAFTERS = { lookup: "lookup in the text", head: "the trained head" };
const ALL = `${MODEL.megabytes + MODEL.head} MB`;

const sum = (row) => row.reduce((total, x) => total + x, 0);
const mean = (row) => sum(row) / row.length;
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const quote = (text) => `“${spelled(text).trim() || "␣"}”`;
const kept = (r) => spots(r).filter((spot) => spot.status === "accepted").length;
const emitted = (r) => spots(r).filter(stays).length;

let ids = 0;
const button = (name, words, onClick) => {
  const made = make("button", { type: "button", class: `live-button live-${name}` }, words);
  made.addEventListener("click", () => { if (made.getAttribute("aria-disabled") !== "true") onClick(); });
  return made;
};
const enable = (element, on) => element.setAttribute("aria-disabled", String(!on)); // unlike `disabled`, it keeps the focus
const labelled = (name, made, kind = "", ...more) => {
  made.id ||= `live-${ids++}`;
  return { made, box: make("div", { class: `live-choice ${kind}` }, make("label", { for: made.id }, name), ...more, made) };
};
const menu = (name, words, onChange) => {
  const found = labelled(name, make("select", {}, ...words.map((word) => make("option", {}, word))));
  found.made.addEventListener("change", () => onChange(found.made.selectedIndex));
  return found;
};
const slider = (name, low, high, step, value, words, onInput = () => {}) => {
  const out = make("output", { class: "live-value" }), found = labelled(name, make("input", { type: "range", min: low, max: high, step, value }), "live-slider", out);
  const show = () => { out.textContent = words(Number(found.made.value)); found.made.setAttribute("aria-valuetext", out.textContent); };
  found.made.addEventListener("input", () => { show(); onInput(Number(found.made.value)); });
  show();
  return { ...found, show };
};

// A lane: a forward is a piece as wide as it took long. Time starts when the prompt has been read, for that takes as long
// with drafts as without; its forward gives the first token.
const laneOf = (title) => {
  const track = make("div", { class: "live-track", "aria-hidden": "true" }), clock = make("span", { class: "live-clock" });
  const lane = { track, clock, rounds: [], box: make("div", {}, make("div", { class: "live-head" }, make("strong", {}, title), clock), track) };
  lane.later = () => lane.rounds.slice(1);
  lane.seconds = () => sum(lane.later().map((r) => r.seconds.draft + r.seconds.target));
  lane.tokens = () => sum(lane.rounds.map(emitted));
  lane.forwards = () => sum(lane.rounds.map((r) => r.forwards));
  lane.clear = (words) => { lane.rounds = []; track.replaceChildren(); clock.textContent = words; };
  lane.add = (r) => {
    const n = emitted(r), piece = (kind, size, words = "") => make("span", { class: `live-piece live-${kind}`, style: `flex:${size} 0 0` }, words);
    lane.rounds.push(r);
    clock.textContent = `${plural(lane.tokens(), "token")}, ${plural(lane.forwards(), "forward")}, ${lane.seconds().toFixed(2)} s`;
    if (lane.rounds.length === 1) return;
    if (r.seconds.draft > 0) track.append(piece("drafting", r.seconds.draft));
    track.append(piece(kept(r) ? "saved" : r.drafts.length ? "lost" : "own", r.seconds.target, n > 1 ? String(n) : ""));
  };
  return lane;
};

const start = (root) => {
  const engine = engineAt(root.dataset.engine);
  let info = null, loading = false, going = null, asked = { temperature: 0 }, at = { round: 0, token: 0 };

  // The model: nothing is fetched before the button is pressed.
  const offer = make("p", { class: "live-offer" }, "A model writes here twice, with drafts and without: the same text, and not in the same time. ", make("strong", {}, MODEL.name), ` (${MODEL.megabytes} MB) and a head trained to draft for it (${MODEL.head} MB) come when you press the button, not before. What you type stays in this page.`);
  const fetching = button("fetch", `Fetch ${ALL}`, () => load({ base: root.dataset.weights }));
  const chooser = labelled("or choose files of yours: the GGUF, and the head’s safetensors", make("input", { type: "file", class: "live-files", multiple: "", accept: ".gguf,.safetensors" }));
  chooser.made.addEventListener("change", () => {
    const files = [...chooser.made.files], model = files.find((file) => file.name.endsWith(".gguf")) || files[0], shards = files.filter((file) => file !== model);
    chooser.made.value = "";
    if (model) joined(shards).then((head) => load({ files: { model, ...(head && { head }) } }), complain);
  });
  const meter = make("progress", { class: "live-meter", max: 1, value: 0, "aria-label": "Loading the model" });
  const cancel = button("cancel", "Cancel", () => engine.send({ type: "cancel" }));
  const clear = button("clear", "Clear what is kept", async () => {
    for (const name of (await caches.keys()).filter((each) => KEPT.test(each))) await caches.delete(name); // also where no engine runs yet
    engine.send({ type: "clear" });
    news.textContent = `Your browser keeps nothing of it any more.${info ? " This tab has the model in its memory until you close it." : ""}`;
    fetching.textContent = `Fetch ${ALL}`;
    fetching.focus({ preventScroll: true });
    clear.hidden = true;
  });
  const own = make("details", { class: "live-own-files" }, make("summary", {}, "or files of yours"), chooser.box);
  const news = make("p", { class: "live-news", role: "status" }), wrong = make("p", { class: "live-wrong", role: "alert", hidden: "" });
  const sources = make("div", { class: "live-buttons" }, fetching, own), waiting = make("div", { class: "live-buttons", hidden: "" }, meter, cancel);
  const complain = (error) => { // beside the buttons, and in sight
    wrong.hidden = !error || error.code === "cancelled";
    wrong.textContent = wrong.hidden ? "" : error.message;
    if (!wrong.hidden) wrong.scrollIntoView({ block: "nearest" });
  };
  const progress = ({ what, done, total }) => {
    const words = `${what === "head" ? "The head" : "The model"}: ${10 * Math.floor((10 * done) / total)} % of ${Math.round(total / 1e6)} MB`;
    meter.value = done / total;
    if (news.textContent !== words) news.textContent = words; // read out ten times, not a thousand
  };
  const load = async (message) => {
    if (loading) return;
    complain(null);
    [loading, sources.hidden, waiting.hidden, clear.hidden, meter.value, news.textContent] = [true, true, false, true, 0, "Loading the model …"];
    cancel.focus({ preventScroll: true });
    try {
      info = await engine.load(message, progress);
      [offer.hidden, runs.hidden] = [true, false];
      news.textContent = `${MODEL.name} is here${info.head ? ", with its trained head" : "; without its head’s file, drafts come from lookup alone"}. Nothing more is fetched.`;
      drafter.made.options[1].disabled = !info.head;
      status.textContent = "Predict: how many forwards will drafts save on this prompt? Then press Run, or Step.";
      ready();
      run.focus({ preventScroll: true });
    } catch (error) {
      news.textContent = error.code === "cancelled" ? "Cancelled: nothing was loaded." : "";
      complain(error);
      sources.hidden = false;
      fetching.focus({ preventScroll: true });
    }
    [loading, waiting.hidden] = [false, true];
    look();
  };
  const look = async () => { // what the browser keeps, without a request
    const names = typeof caches === "object" ? await caches.keys().catch(() => []) : [];
    const found = await Promise.all(names.filter((name) => KEPT.test(name)).map(async (name) => (await (await caches.open(name)).keys()).length));
    clear.hidden = !sum(found);
    if (sum(found)) fetching.textContent = sum(found) < MODEL.parts ? `Fetch the rest of the ${ALL}, ${sum(found)} of ${MODEL.parts} parts are kept` : `Load: your browser has kept the ${ALL}`;
  };

  // What to decode
  const reason = make("p", { class: "live-reason" }), told = (i) => { reason.textContent = PROMPTS[i][1]; };
  const examples = menu("Prompt", PROMPTS.map(([name]) => name), (i) => {
    told(i);
    prompt.value = PROMPTS[i][2];
    if (prompt.value) return;
    settings.open = true;
    prompt.focus();
  });
  const prompt = make("textarea", { class: "live-question", rows: 3, "aria-label": "What you ask the model", spellcheck: "false" });
  prompt.value = PROMPTS[0][2];
  prompt.addEventListener("input", () => { examples.made.selectedIndex = PROMPTS.length - 1; told(PROMPTS.length - 1); });
  const drafter = menu("Drafts come from", Object.values(DRAFTERS), () => {});
  const adaptive = labelled("The clock chooses how many", make("input", { type: "checkbox", checked: "" }), "live-check");
  const K = slider("K, draft tokens at most", 1, MOST_K, 1, 5, String), N = slider("Tokens, at most", 8, LONGEST, 8, 48, String);
  const T = slider("Temperature", 0, 1.5, 0.1, 0, (x) => (x ? x.toFixed(1) : "0, greedy"));
  const seed = labelled("Seed", make("input", { type: "number", min: 0, step: 1, value: 1 }));
  const run = button("run", "Run", () => (going ? goOn() : begin(false))), step = button("step", "Step", () => (going ? again() : begin(true)));
  const stop = button("stop", "Stop", () => engine.send({ type: "cancel", id: going.id }));
  const runs = make("div", { class: "live-buttons", hidden: "" }, run, step, stop);
  const settings = make("details", { class: "live-settings" }, make("summary", {}, "Prompt and settings"), prompt,
    make("div", { class: "live-choices" }, drafter.box, K.box, adaptive.box, T.box, N.box, seed.box));
  const status = make("p", { class: "live-status", role: "status" });

  // What came
  const drafted = laneOf("With drafts"), plain = laneOf("Plain decoding");
  const add = (lane, r) => {
    lane.add(r);
    const longest = Math.max(drafted.seconds(), plain.seconds(), 1e-9);
    for (const each of [drafted, plain]) each.track.style.width = `${(100 * each.seconds()) / longest}%`;
  };
  const verdict = make("p", { class: "live-verdict" }), honest = make("p", { class: "live-honest" });
  const swatch = (kind, words) => [make("span", { class: `live-swatch live-${kind}` }), `${words} `];
  const text = make("div", { class: "live-text", role: "toolbar", "aria-label": "The text so far. Arrow keys move from token to token" });
  const strip = make("div", { class: "live-strip", role: "toolbar", "aria-label": "This round's tokens. Arrow keys move from token to token" });
  const round = slider("Round", 1, 1, 1, 1, (n) => `${n} of ${drafted.rounds.length}`, (n) => go(n - 1));
  const key = make("p", { class: "live-key" }, ...["accepted", "rejected", "corrected", "bonus", "never"].flatMap((name) => [make("span", { class: `status-${name}`, title: MEANING[name] }, ` ${name === "never" ? "never tried" : name} `), " "]));
  const lens = make("div", { class: "live-lens", role: "region", "aria-label": "The token under the microscope" });
  const reading = make("section", { class: "live-reading", "aria-label": "The text and its rounds", hidden: "" }, text, round.box, strip, key, lens);

  // Tokens as buttons. One of a group is in the tab order; the arrows lead to the others.
  const token = (spot, r, j, inText) => {
    const made = make("button", { type: "button", tabindex: -1, class: `live-spot status-${spot.status}`, "data-round": r, "data-token": j, title: MEANING[spot.status], "aria-pressed": "false",
      "aria-label": `${spelled(spot.text).trim() || "space"}: ${MEANING[spot.status]}` }, inText ? spelled(spot.text) : visible(spot.text));
    made.addEventListener("click", () => go(r, j));
    return inText && spot.text.includes("\n") && stays(spot) ? make("span", {}, made, make("br")) : made;
  };
  const pieces = (r, n, inText) => make("span", { class: "live-round", "data-round": n },
    ...spots(r).map((spot, j) => (inText && spot.status === "never" ? "" : token(spot, n, j, inText))));
  const press = (box) => {
    const had = box.contains(document.activeElement), all = [...box.querySelectorAll("button")];
    const chosen = all.find((each) => Number(each.dataset.round) === at.round && Number(each.dataset.token) === at.token);
    for (const each of all) {
      each.setAttribute("aria-pressed", String(each === chosen));
      each.tabIndex = each === (chosen || all[0]) ? 0 : -1;
    }
    if (had) chosen?.focus({ preventScroll: true });
    for (const each of box.querySelectorAll(".live-round")) each.classList.toggle("live-now", Number(each.dataset.round) === at.round);
  };
  for (const box of [text, strip]) box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], all = [...box.querySelectorAll("button")];
    if (!by) return;
    event.preventDefault();
    all[all.indexOf(document.activeElement) + by]?.click();
  });
  // The token that decided a round: the rejected one, else the last.
  const deciding = (r) => { const found = spots(r), failed = found.findIndex((spot) => spot.status === "rejected"); return failed < 0 ? found.findLastIndex(stays) : failed; };
  const go = (n, j = deciding(drafted.rounds[n])) => {
    const r = drafted.rounds[n], had = strip.contains(document.activeElement);
    at = { round: n, token: j };
    strip.replaceChildren(pieces(r, n, false));
    if (had) strip.querySelectorAll("button")[j].focus({ preventScroll: true });
    for (const box of [text, strip]) press(box);
    round.made.value = n + 1;
    round.show();
    lens.replaceChildren(...microscope(r, j, asked.temperature === 0));
  };

  // What stands below belongs to the last run as soon as something else is asked for.
  const outdated = () => {
    if (going || loading || !drafted.rounds.length || root.classList.contains("live-old")) return;
    root.classList.add("live-old");
    status.textContent = info ? "Below stands the last run. Predict: how many forwards will drafts save now? Then press Run, or Step." : "Below stands the recorded run of the first prompt. For yours, press the button.";
  };
  // A run: with drafts first, then without them
  const ready = () => {
    enable(run, info && (!going || going.waits));
    enable(step, info && (!going || going.waits));
    enable(stop, !!going?.id);
    run.textContent = going?.waits ? "Play on" : "Run";
  };
  const sentence = (r, n) => {
    const own = r.token && quote(r.token.text), all = r.drafts.length;
    return `Round ${n}: ${!all ? `${n === 1 ? "the prompt is read, and its forward" : "nothing was drafted; the target"} says ${own}.` : !r.token ? "the text ends inside the draft."
      : kept(r) === all ? `${all === 1 ? "the draft token is" : `all ${all} draft tokens are`} accepted, and ${own} comes on top.`
      : `of ${plural(all, "draft token")}, ${kept(r)} accepted; the target says ${own} in place of ${quote(r.drafts[kept(r)].text)}.`}`;
  };
  const again = () => {
    going.waits = false;
    engine.send({ type: "next", id: going.id });
    ready();
  };
  const goOn = () => {
    going.paced = going.waits = false;
    status.textContent = "Writing …";
    engine.send({ type: "play", id: going.id });
    ready();
  };
  const write = (lane, options, onRound = () => {}) => engine.generate(options, {
    began: (id) => { going.id = id; ready(); },
    progress: ({ what, done, total }) => { if (what === "prompt") lane.clock.textContent = `${done} of ${total} tokens of the prompt read`; },
    round: (r) => { add(lane, r); onRound(r); },
  });
  const read = (r) => { // a round's tokens join the text
    const n = drafted.rounds.length;
    reading.hidden = false;
    text.append(pieces(r, n - 1, true));
    text.scrollTop = text.scrollHeight;
    round.made.max = n;
    go(n - 1);
    return n;
  };
  const came = (r) => {
    const n = read(r);
    going.waits = going.paced;
    status.textContent = going.paced ? `${sentence(r, n)} Press Step for the next round.` : "Writing …";
    ready();
  };
  const goTelling = () => { // to a round in which a draft token was kept and one rejected, else to the longest
    const both = drafted.rounds.findIndex((r) => kept(r) && kept(r) < r.drafts.length), counts = drafted.rounds.map(kept);
    go(both >= 0 ? both : counts.indexOf(Math.max(...counts)));
  };
  const begin = async (paced) => {
    asked = { prompt: prompt.value, adaptive: adaptive.made.checked, K: Number(K.made.value), temperature: Number(T.made.value), seed: Number(seed.made.value), maxNewTokens: Number(N.made.value), drafter: Object.keys(DRAFTERS)[drafter.made.selectedIndex] };
    drafted.clear("reading the prompt …");
    plain.clear("comes after it: the same prompt");
    [verdict.textContent, honest.textContent, reading.hidden, status.textContent] = ["", "", true, "Reading the prompt …"];
    text.replaceChildren();
    complain(null);
    root.classList.remove("live-old");
    going = { id: null, paced, waits: false };
    ready();
    try {
      const first = await write(drafted, { ...asked, paced }, came);
      going.waits = going.paced = false;
      ready();
      if (first.end !== "cancelled") {
        status.textContent = "Now the same without drafts …";
        const second = await write(plain, { ...asked, drafter: "plain", maxNewTokens: first.ids.length, paced: false });
        if (second.end !== "cancelled") judge(String(first.ids) === String(second.ids));
        if (!paced) goTelling();
      }
      status.textContent = verdict.textContent ? `Done: ${verdict.firstChild.textContent}` : "Stopped.";
    } catch (error) {
      status.textContent = error.code === "cancelled" ? "Stopped." : "";
      complain(error);
    }
    for (const lane of [drafted, plain]) if (!lane.rounds.length) lane.clear("–");
    going = null;
    ready();
  };
  // What drafts bought, and what a token costs that was thrown away
  const judge = (same) => {
    const rounds = drafted.later(), drafts = rounds.map((r) => r.drafts.length).filter(Boolean), all = sum(drafts), lost = all - sum(rounds.map(kept));
    const rate = (lane) => (lane.tokens() - 1) / lane.seconds(), times = rounds.length ? rate(drafted) / rate(plain) : 1;
    const length = [...new Set(drafts)].sort((a, b) => drafts.filter((n) => n === b).length - drafts.filter((n) => n === a).length)[0]; // the most frequent
    const one = mean(plain.later().map((r) => r.seconds.target)), v = length && mean(rounds.filter((r) => r.drafts.length === length).map((r) => r.seconds.target)) / one;
    const drafting = all && sum(rounds.map((r) => r.seconds.draft)) / all, cost = v && 1000 * (drafting + Math.max(0, ((v - 1) * one) / length));
    // drafts can't have cost more than this; where the lanes are farther apart, the machine was uneven
    const spent = sum(rounds.filter((r) => r.drafts.length).map((r) => r.seconds.draft + Math.max(0, r.seconds.target - one)));
    const behind = drafted.seconds() - plain.seconds(), uneven = behind > 1.5 * spent + 0.02 * plain.seconds();
    const wins = times >= 1.05, loses = times < 0.95, alone = rounds.length - drafts.length;
    verdict.replaceChildren(
      make("strong", {}, `${plural(drafted.tokens(), "token")} in ${plural(drafted.forwards(), "forward")} instead of ${plain.forwards()}, ${wins ? `${times.toFixed(2)} × as fast` : loses ? `and yet slower: ${times.toFixed(2)} × the speed` : `as fast as without drafts (${times.toFixed(2)} ×)`}. `),
      same ? "It is the same text, token for token: drafts decide how soon a token comes, never which. " : "And the texts differ, which is a fault of this page: please report it. ",
      !all ? "Nothing was drafted: no words came twice, or drafts didn’t pay. " : `Of ${plural(all, "draft token")}, ${lost} ${lost === 1 ? "was" : "were"} thrown away. `,
      v ? `${drafting * 1000 < 0.5 ? "A" : `A draft token took ${(1000 * drafting).toFixed(1)} ms to draft, and a`} forward over ${plural(length + 1, "token")} took ${v.toFixed(2)} times as long as one over a single token, v(${length}) = ${v.toFixed(2)}${lost ? `; so a token thrown away costs ${cost.toFixed(1)} ms, and nothing else` : ""}. ` : "",
      asked.adaptive && alone ? `In ${plural(alone, "round")} of ${rounds.length} the target wrote alone: ${asked.drafter === "head" ? "" : "nothing was found, or "}the clock said that a draft wouldn’t pay. ` : "",
      `Time counts from the end of the prompt, which took ${drafted.rounds[0].seconds.target.toFixed(1)} s to read.`);
    const why = "One thread of WebAssembly computes about as fast as it reads the weights, so each further token in a forward takes time, and v(K) climbs towards K + 1. ";
    const carries = "A GPU, or a big model, waits for its weights: there a few tokens more are nearly free. What carries over from here are the forwards saved.";
    honest.textContent = (wins ? "Why isn’t it faster still? " : loses ? "Why is it slower? " : "Why is nothing gained? ") + (loses && uneven ? `Drafts cost at most ${spent.toFixed(2)} of the ${behind.toFixed(2)} s; for the rest, plain forwards took longer here than in the lane below. Run it again. ` : wins ? "" : !all ? "There was nothing to draft from. " : asked.adaptive
      ? "Too few of these drafts were right for what they cost, so the clock soon stops drafting; what is lost are the rounds that it took to find out. "
      : "Too few of these drafts were right for what they cost. Tick “The clock chooses how many”, and it stops drafting. ") + (all ? why + carries : "");
  };
  // A run of this page that happened, until there is one of the visitor's
  const replay = async () => {
    const answer = await fetch(new URL("recorded.json", import.meta.url)).catch(() => null), found = answer?.ok && await answer.json();
    if (!found || info || going) return;
    asked = found.asked;
    for (const r of found.drafted) { add(drafted, r); read(r); }
    for (const r of found.plain) add(plain, r);
    judge(true);
    goTelling();
    status.textContent = `A recorded run of the first prompt, on ${found.machine}. For yours, press the button.`;
  };

  window.specdec = {
    // {ids, text, rounds, seconds}: new tokens only; it rejects with an Error whose message is one sentence
    generate: async ({ prompt: question, ids, K = 5, temperature = 0, seed = 1, maxNewTokens = 48, drafter = "lookup", adaptive: pays = false } = {}) => {
      if (!info) throw failure("bad-input", "The model isn’t loaded yet: press the button that fetches it, or choose its file.");
      if (going) throw failure("bad-input", "The page itself is writing a text: wait for its end, or press Stop.");
      const found = await engine.generate({ ...(ids === undefined ? { prompt: question } : { ids }), K, temperature, seed, maxNewTokens, drafter, adaptive: pays, paced: false });
      return { ids: found.ids, text: found.text, rounds: found.rounds, seconds: found.seconds };
    },
  };

  root.replaceChildren(
    make("section", { class: "live-panel", "aria-label": "What to decode" }, offer, make("div", { class: "live-ask" }, examples.box, sources, waiting, runs), wrong, reason, news, status, settings, clear),
    make("section", { class: "live-lanes", "aria-label": "Both lanes on one axis of time" }, drafted.box, plain.box,
      make("p", { class: "live-key" }, ...swatch("drafting", "drafting"), ...swatch("saved", "a forward that kept draft tokens, and how many tokens came of it"), ...swatch("lost", "one whose draft was thrown away"), ...swatch("own", "one without a draft")), verdict),
    reading, honest);
  for (const change of ["input", "change"]) root.querySelector(".live-panel").addEventListener(change, outdated);
  told(0);
  settings.open = root.clientWidth > 760; // on a phone the lanes come first
  drafted.clear("–");
  plain.clear("–");
  clear.hidden = true;
  ready();
  look();
  replay();
  root.dataset.ready = "true";
};

for (const root of document.querySelectorAll(".live")) start(root);
