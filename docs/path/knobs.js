// The tour's two sliders without a kernel: data/knobs.json holds what the tour's own `generate` said at every place of both
// (tools/knobs.py wrote it). Without this script the figure below stands alone.
(() => {
  "use strict";
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  const start = (root, data) => {
    const { Ks, temperatures, tokens, runs } = data;
    const head = make("p", { class: "knobs-head", role: "status" }), text = make("div", { class: "knobs-text" });
    const knob = (name, values, chosen) => {
      const id = `knobs-${name}`, value = make("output", { for: id });
      const slider = make("input", { id, type: "range", min: 0, max: values.length - 1, step: 1, value: values.indexOf(chosen) });
      slider.addEventListener("input", () => draw());
      return { slider, value, box: make("div", { class: "knobs-knob" }, make("label", { for: id }, name), slider, value) };
    };
    const K = knob("K", Ks, 5), T = knob("temperature", temperatures, 0);
    const draw = () => {
      const k = K.slider.valueAsNumber, t = T.slider.valueAsNumber, rounds = runs[t][k];
      const n = rounds.reduce((sum, round) => sum + round.length, 0), words = `K = ${Ks[k]}, temperature ${temperatures[t].toFixed(1)}`;
      for (const [{ slider, value }, said] of [[K, String(Ks[k])], [T, temperatures[t].toFixed(1)]]) {
        value.textContent = said;
        slider.setAttribute("aria-valuetext", said);
      }
      head.textContent = `${words}: ${n} tokens in ${rounds.length} rounds, ${(n / rounds.length).toFixed(2)} a round`;
      text.replaceChildren(...rounds.flatMap((round) => round.map((token, i) =>
        make("span", { class: `status-${i === round.length - 1 ? "corrected" : "accepted"}` }, tokens[token]))));
    };
    root.replaceChildren(make("div", { class: "knobs-knobs" }, K.box, T.box), head, text);
    draw();
    // The box is as tall as its longest text: nothing below moves while one turns.
    const said = [...new Set(runs.flat().map((rounds) => rounds.flat().map((token) => tokens[token]).join("")))];
    let measured = 0;
    new ResizeObserver(() => {
      if (root.clientWidth === measured) return;
      measured = root.clientWidth;
      const copy = make("div", { class: "knobs-text knobs-measure" });
      root.append(copy);
      const heights = said.map((words) => { copy.textContent = words; return copy.offsetHeight; });
      copy.remove();
      text.style.minHeight = `${Math.max(...heights)}px`;
    }).observe(root);
    root.dataset.ready = "true";
  };

  for (const root of document.querySelectorAll(".knobs")) {
    fetch(root.dataset.runs).then((answer) => answer.json()).then((data) => start(root, data), () => {}); // the figure stays
  }
})();
