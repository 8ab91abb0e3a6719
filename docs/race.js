// A race that happened: plain and speculative decoding of one prompt, played back with the times they took. data/race.json holds
// what the package's own loop did (tools/race.py wrote it). Without this script a picture stays in its place.
(() => {
  "use strict";
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const PAUSE = 2.5; // seconds between the end of a race and the next start

  const start = (root, data) => {
    const still = window.matchMedia("(prefers-reduced-motion: reduce)");
    const choice = (name, values, chosen, words) => {
      const menu = make("select", { "aria-label": name }, ...values.map((value) => make("option", { value, ...(value === chosen ? { selected: "" } : {}) }, words(value))));
      menu.addEventListener("change", begin);
      return menu;
    };
    const lane = (title, kind) => {
      const text = make("div", { class: "race-text", tabindex: "0", role: "region", "aria-label": `${title}: the text` }), clock = make("span", { class: "race-clock" });
      return { kind, text, clock, box: make("div", { class: `race-lane race-${kind}` }, make("div", { class: "race-head" }, make("strong", {}, title), clock), text) };
    };
    const lanes = [lane("Plain decoding", "plain"), lane("Speculative decoding", "speculative")];
    const button = make("button", { type: "button", class: "race-button" });
    const result = make("p", { class: "race-result", role: "status" });
    const temperatures = data.races.map((race) => race.temperature);
    const slow = make("input", { type: "checkbox" });
    const prompt = make("p", { class: "race-prompt" }, make("strong", {}, "Prompt: "), `${data.prompt} `, make("strong", {}, "Drafter: "), `${data.drafter}.`);
    let playing = false, clock = 0, last = 0, frame = 0, drawn = [0, 0];
    const T = choice("Temperature", temperatures, 0, (value) => (value === 0 ? "temperature 0" : `temperature ${value}`));
    const K = choice("K, draft tokens per round", data.Ks, 4, (value) => `K = ${value}`);

    const rounds = (kind) => data.races[T.selectedIndex].lanes[kind === "plain" ? "plain" : String(data.Ks[K.selectedIndex])];
    const ends = () => lanes.map((each) => rounds(each.kind).at(-1).end);
    const count = (list) => list.reduce((sum, round) => sum + round.text.length, 0);
    // What a round rejected stands struck out behind the text until the next round, then falls.
    const piece = (round) => [
      ...round.text.map((token, i) => make("span", { class: i < round.accepted ? "status-accepted" : "" }, token)),
      ...round.rejected.map((token) => make("span", { class: "status-rejected race-fallen" }, token))];

    const draw = (time) => lanes.forEach((each, i) => {
      const list = rounds(each.kind), end = list.at(-1).end;
      while (drawn[i] < list.length && list[drawn[i]].end <= time) {
        each.text.querySelectorAll(".race-fallen").forEach((token) => token.remove());
        each.text.append(...piece(list[drawn[i]++]));
      }
      if (time >= end) each.text.querySelectorAll(".race-fallen").forEach((token) => token.remove());
      if (playing) each.text.scrollTop = each.text.scrollHeight; // standing still, the whole text can be scrolled
      each.clock.textContent = `${count(list.slice(0, drawn[i]))} tokens, ${drawn[i]} forwards, ${Math.min(time, end).toFixed(1)} s`;
    });
    const say = () => {
      const [plain, speculative] = ends(), [a, b] = lanes.map((each) => rounds(each.kind));
      const times = plain / speculative;
      result.textContent = `The same text: ${count(b)} tokens in ${b.length} forwards instead of ${a.length}, ${times.toFixed(2)} × as fast.`;
    };
    const clear = () => {
      clock = 0;
      drawn = [0, 0];
      for (const each of lanes) each.text.replaceChildren();
    };
    const tick = (now) => {
      clock += Math.min(.1, (now - last) / 1000) * (slow.checked ? .25 : 1);
      last = now;
      const longest = Math.max(...ends());
      draw(clock);
      if (clock > longest + PAUSE) clear();
      if (playing) frame = requestAnimationFrame(tick);
    };
    const play = (on) => {
      playing = on;
      button.textContent = on ? "Pause" : "Play";
      cancelAnimationFrame(frame);
      if (on) { last = performance.now(); frame = requestAnimationFrame(tick); }
    };
    function begin() {
      clear();
      say();
      if (playing) return;
      draw(Infinity); // a picture of the end
    }
    button.addEventListener("click", () => {
      if (!playing && drawn[0] >= rounds("plain").length) clear();
      play(!playing);
    });
    document.addEventListener("visibilitychange", () => { last = performance.now(); });

    root.replaceChildren(
      prompt,
      make("div", { class: "race-bar" }, button, T, K, make("label", {}, slow, " quarter speed"),
        make("span", { class: "race-key" }, make("span", { class: "status-accepted" }, "green"), " was guessed and kept; ", make("span", { class: "status-rejected" }, "red"), " was rejected, or came after it")),
      ...lanes.map((each) => each.box), result);
    begin();
    if (!still.matches) clear();
    play(!still.matches);
    root.dataset.ready = "true";
  };

  for (const root of document.querySelectorAll(".race")) {
    fetch(root.dataset.runs).then((answer) => answer.json()).then((data) => start(root, data), () => {}); // the picture stays
  }
})();
