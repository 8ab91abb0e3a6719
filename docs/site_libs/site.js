// What the pages do beside smalldocs.js: search that puts words before likeness, the menu and the contents of a narrow
// window, and a fade at the edge of whatever can be scrolled sideways.
(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector, root = document) => root.querySelector(selector);
  const root = one('meta[name="smalldocs:offset"]').content;
  const make = (kind, name, ...inside) => {
    const element = document.createElement(kind);
    element.className = name;
    element.append(...inside);
    return element;
  };

  // Search: an entry must hold every word of the query but those that only make a question of it. Where prose holds them
  // all comes before where code does. Titles, and the terms that a page is about, come before headings, headings before
  // text, whole words before beginnings and those before pieces, which a short word has none of: "rate" is not meant by
  // "generate". What teaches comes before what is built of it; what is alike stays in reading order.
  const wordsOf = (text) => text.toLowerCase().normalize("NFKD").match(/[\p{L}\p{N}_]+/gu) || [];
  const ASKING = new Set("a an and are can do does for how i in is it my of on the to what when which why with".split(" "));
  const meant = (text) => {
    const words = wordsOf(text), some = words.filter((word) => !ASKING.has(word));
    return some.length ? some : words;
  };
  const AS_TITLE = [60, 25], AS_HEADING = [40, 15], AS_TEXT = [6, 2], PIECE = 1, WHOLE = 100, IN_CODE = -1000;
  const LEARN = 30, TOGETHER = 20, SHORT = 4; // points on a page of Learn, of words side by side; letters of a short word
  let loading = null;
  const load = () => loading ||= read().catch((error) => { loading = null; throw error; });  // once, however often asked
  const read = async () => {
    const entries = await (await fetch(`${root}search.json`)).json();
    return entries.map((entry) => {
      const {page, name, section, terms = []} = entry, heading = section || `${page} ${name}`;
      const names = section ? [section] : [page, name, ...terms], about = new Set(wordsOf(`${heading} ${terms.join(" ")}`));
      const text = `${heading} ${entry.text}`, words = wordsOf(text);
      return {...entry, names: names.map((name) => meant(name).join(" ")), about, heading: wordsOf(heading), words: new Set(words),
              said: ` ${words.join(" ")} `, all: text.toLowerCase(), codes: entry.code.toLowerCase().split(" ")};
    });
  };
  const score = (entry, terms) => {
    const [whole, beginning] = entry.section ? AS_HEADING : AS_TITLE, together = terms.join(" ");
    let sum = entry.names.includes(together) ? WHOLE : 0;
    for (const term of terms) {
      if (entry.about.has(term)) sum += whole;
      else if (entry.heading.some((word) => word.startsWith(term))) sum += beginning;
      else if (entry.words.has(term)) sum += AS_TEXT[0];
      else if ([...entry.words].some((word) => word.startsWith(term))) sum += AS_TEXT[1];
      else if (term.length > SHORT && entry.all.includes(term)) sum += PIECE;
      else if (entry.codes.includes(term)) sum += IN_CODE + AS_TEXT[0];
      else if (entry.codes.some((word) => word.startsWith(term))) sum += IN_CODE + AS_TEXT[1];
      else return -Infinity;
    }
    if (terms.length > 1 && entry.said.includes(` ${together} `)) sum += TOGETHER;
    return sum + (entry.learn ? LEARN : 0);
  };
  const search = (index, text) => {
    const terms = meant(text), seen = new Map();
    if (!terms.length) return [];
    const found = index.map((entry) => ({entry, score: score(entry, terms)})).filter((hit) => hit.score > -Infinity);
    found.sort((a, b) => b.score - a.score);
    return found.filter(({entry}) => {  // at most two places of one page
      const page = entry.href.split("#")[0], before = seen.get(page) || 0;
      seen.set(page, before + 1);
      return before < 2;
    }).slice(0, 12).map((hit) => hit.entry);
  };
  const excerpt = (entry, terms) => {
    const holds = (word) => terms.some((term) => word.toLowerCase().includes(term));
    const text = holds(entry.text) ? entry.text : [...entry.code.split(" ").filter(holds), entry.text].join(" ");
    const at = Math.max(0, ...terms.map((term) => text.toLowerCase().indexOf(term)));
    const start = at > 50 ? text.indexOf(" ", at - 50) + 1 : 0, shown = text.slice(start, start + 140);
    const safe = terms.map((term) => term.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|");
    const parts = shown.split(new RegExp(`(${safe})`, "i")).map((part, n) => n % 2 ? make("mark", "", part) : part);
    return make("span", "result-text", start ? "… " : "", ...parts);
  };
  all(".site-search").forEach((box) => {
    const input = one("input", box), results = one(".site-results", box);
    let active = -1;
    const show = async () => {
      const terms = meant(input.value);
      if (input.value.trim().length < 2) { results.hidden = true; return; }
      const hits = search(await load(), input.value);
      active = -1;
      results.replaceChildren(...hits.map((hit) => {
        const link = make("a", "result", make("span", "result-page", hit.page, " ", make("span", "menu-name", hit.name)));
        if (hit.section) link.append(make("span", "result-section", hit.section));
        link.append(excerpt(hit, terms));
        link.href = root + hit.href;
        return link;
      }));
      if (!hits.length) results.append(make("span", "result-none", "Nothing with these words"));
      results.hidden = false;
    };
    input.addEventListener("focus", load);
    input.addEventListener("input", show);
    input.addEventListener("keydown", (event) => {
      const links = all("a", results);
      if (event.key === "Escape") { results.hidden = true; input.blur(); }
      if (event.key === "Enter" && links.length) links[Math.max(active, 0)].click();
      const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
      if (!step || !links.length) return;
      event.preventDefault();
      active = (active + step + links.length) % links.length;
      links.forEach((link, n) => link.classList.toggle("active", n === active));
      links[active].scrollIntoView({block: "nearest"});
    });
    document.addEventListener("click", (event) => { if (!box.contains(event.target)) results.hidden = true; });
  });

  // The sidebar of a narrow window
  const sidebar = one("#quarto-sidebar"), glass = one("#quarto-sidebar-glass"), menu = one(".site-menu");
  const open = (shown) => {
    [sidebar, glass].forEach((element) => element.classList.toggle("show", shown));
    menu.setAttribute("aria-expanded", shown);
  };
  const find = () => {
    if (getComputedStyle(menu).display !== "none") open(true);
    one(".site-search input").focus();
  };
  menu.addEventListener("click", () => {
    open(!sidebar.classList.contains("show"));
    if (sidebar.classList.contains("show")) one("a, button", sidebar).focus();
  });
  glass.addEventListener("click", () => open(false));
  one(".site-find").addEventListener("click", find);
  const here = one(".sidebar-link.active", sidebar);  // in sight, however long the list
  if (here && here.offsetTop > innerHeight / 2) sidebar.scrollTop = here.offsetTop - innerHeight / 3;

  // What is on this page
  const contents = one(".page-contents");
  const close = () => { if (contents) contents.open = false; };
  document.addEventListener("click", (event) => {
    if (contents && (!contents.contains(event.target) || event.target.closest("a"))) close();
  });

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      if (contents?.open && contents.contains(document.activeElement)) one("summary", contents).focus();  // not lost
      open(false);
      close();
    }
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName);
    if ((event.key === "/" && !typing) || (event.key === "k" && (event.ctrlKey || event.metaKey))) {
      event.preventDefault();
      find();
    }
  });

  // What can be scrolled sideways fades where it goes on, and a keyboard can reach it
  const boxes = all("main pre, main .cell-output, main figure > p, main .sd-table, main table, main .katex-display");
  const measured = (box) => {
    const over = box.scrollWidth - box.clientWidth, scrolls = over > 1 && getComputedStyle(box).overflowX === "auto";
    return {box, scrolls, left: scrolls && box.scrollLeft > 1, right: scrolls && box.scrollLeft < over - 1};
  };
  const fade = ({box, scrolls, left, right}) => {
    box.classList.toggle("more-left", left);
    box.classList.toggle("more-right", right);
    if (scrolls) box.tabIndex = 0; else box.removeAttribute("tabindex");
  };
  const fadeAll = () => boxes.map(measured).forEach(fade);  // all is read before anything is written
  boxes.forEach((box) => box.addEventListener("scroll", () => fade(measured(box)), {passive: true}));
  new ResizeObserver(fadeAll).observe(one("main"));
  document.addEventListener("toggle", fadeAll, true);
  addEventListener("load", fadeAll);
})();
