"""A page in a real browser, and what to ask of any page: colours, widths, headings, names, pictures."""
# Runs in the page. Colours are blended with what lies behind them, as a reader sees them (WCAG 2.1, success criterion
# 1.4.3).
AUDIT = """() => {
  const channel = (v) => { v /= 255; return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const known = new Map();
  const parse = (colour) => {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(colour, [r, g, b, a / 255]);
    }
    return known.get(colour);
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const behind = new Map();
  const background = (element) => {
    if (!element) return [255, 255, 255];
    if (!behind.has(element))
      behind.set(element, over(parse(getComputedStyle(element).backgroundColor), background(element.parentElement)));
    return behind.get(element);
  };
  const seen = new Map();
  const opacity = (element) => {
    if (!element) return 1;
    if (!seen.has(element))
      seen.set(element, Number(getComputedStyle(element).opacity) * opacity(element.parentElement));
    return seen.get(element);
  };
  const looked = new Map();  // pieces of code of one kind look the same in one block
  const alike = (element) => {
    const block = element.parentElement;
    if (!block.matches('code.sourceCode')) return false;
    if (!looked.has(block)) looked.set(block, new Set());
    return looked.get(block).has(element.className) || !looked.get(block).add(element.className);
  };
  const faint = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, words = walker.currentNode.textContent.trim();
    const aside = element.closest('script, style, .katex-mathml, [aria-hidden=true]:not(.touch-idle), :disabled');
    if (!words || aside || alike(element) || !element.checkVisibility({visibilityProperty: true})) continue;
    const style = getComputedStyle(element), back = background(element), [r, g, b, a] = parse(style.color);
    const [x, y] = [luminance(over([r, g, b, a * opacity(element)], back)), luminance(back)];
    const ratio = (Math.max(x, y) + .05) / (Math.min(x, y) + .05), size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const where = `${element.tagName.toLowerCase()}.${element.className} ${style.color} on ${back.map(Math.round)}`;
    if (ratio < needed && !faint.has(where)) faint.set(where, `${ratio.toFixed(2)}: ${where}: ${words.slice(0, 30)}`);
  }
  const headings = document.querySelectorAll('main h1, main h2, main h3, main h4, main h5, main h6');
  const levels = [...headings].map((h) => Number(h.tagName[1]));
  return {
    faint: [...faint.values()],
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    skipped: levels.map((level, i) => [level, i ? levels[i - 1] : 0]).filter(([level, before]) => level > before + 1),
    titles: levels.filter((level) => level === 1).length,
    unnamed: [...document.querySelectorAll('img')].filter((i) => !i.alt.trim()).map((i) => i.src),
    missing: [...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src),
    math: [...document.querySelectorAll('.katex-error')].map((e) => e.textContent),
    unlabelled: [...document.querySelectorAll('button, input, select, a[href]')].filter((e) =>
      e.checkVisibility({visibilityProperty: true}) && !(e.innerText || e.value || '').trim() && !e.title
      && !e.ariaLabel && !e.placeholder
      && !(e.labels && e.labels.length) && !e.querySelector('img[alt]')).map((e) => e.outerHTML.slice(0, 80)),
  };
}"""

# Runs in the page, after the page has heard of its new width. Code that scrolls sideways; what else does and does not
# say so by a fade; how many letters a line of text holds; what leads to the page's contents.
LAYOUT = """async () => {
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
  const main = document.querySelector('main'), shown = (e) => e && e.checkVisibility({visibilityProperty: true});
  const probe = document.createElement('p'), letters = document.createElement('span');
  letters.textContent = 'The target, a big model, has a distribution over the next word. '.repeat(3);
  letters.style.whiteSpace = 'nowrap';
  probe.append(letters);
  main.append(probe);
  const column = probe.clientWidth / (letters.getBoundingClientRect().width / letters.textContent.length);
  const share = probe.clientWidth / innerWidth;
  probe.remove();
  const over = (e) => e.scrollWidth > e.clientWidth + 1 && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
  const boxes = [...main.querySelectorAll(
    'pre, code, .cell-output, figure, figure p, .sd-table, table, .katex-display')];
  const scrolling = boxes.filter((e) => shown(e) && over(e));
  const words = (e) => (e.textContent.trim() || e.outerHTML).slice(0, 60);
  const inside = (e) => e !== main && (['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX)
    || inside(e.parentElement));
  const blocks = [...main.querySelectorAll('p, pre, div, table, img, figure, details, summary, ul, ol, h1, h2, h3')];
  const cut = blocks.filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !inside(e.parentElement)
    && shown(e));
  return {
    cut: cut.map(words),
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth, column, share,
    code: scrolling.filter((e) => e.matches('pre, code')).map(words),
    silent: scrolling.filter((e) => getComputedStyle(e).maskImage === 'none' || e.tabIndex < 0).map(words),
    contents: [shown(document.querySelector('#TOC')), shown(document.querySelector('.page-contents > summary'))],
  };
}"""

# Runs in the page, with everything unfolded that folds. Pictures without a size; drawings so much smaller than they
# were drawn that their letters can't be read; figures that break over several lines; links inside a sentence that look
# like buttons.
LOOKS = """async () => {
  const main = document.querySelector('main');
  main.querySelectorAll('details').forEach((details) => { details.open = true; });
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
  const shown = (e) => e.checkVisibility({visibilityProperty: true}), box = (e) => e.getBoundingClientRect();
  const said = (e) => e.getAttribute('src') || e.outerHTML.slice(0, 60);
  const pictures = [...document.querySelectorAll('img, svg:not(svg svg), canvas')].filter(shown);
  const drawings = pictures.filter((e) => /\\.svg$/.test(e.getAttribute('src')) && main.contains(e));
  const lines = (e) => {
    const range = document.createRange();
    range.selectNodeContents(e);
    let below = -Infinity, count = 0;  // a box round code is taller than its text, and on the same line
    for (const r of [...range.getClientRects()].sort((a, b) => a.top - b.top)) {
      if ((r.top + r.bottom) / 2 > below) count += 1;
      below = Math.max(below, r.bottom);
    }
    return count;
  };
  const cells = [...main.querySelectorAll('td')].filter((e) => shown(e)
    && /^[-+−]?[\\d.]+( \\([\\d.]+ to [\\d.]+\\))?$/.test(e.innerText.trim()));
  const alone = (p) => [...p.childNodes].every((n) => !n.textContent.trim() || n.matches?.('a, strong:has(> a)'));
  const framed = (a) => getComputedStyle(a).borderTopStyle !== 'none' || getComputedStyle(a).display !== 'inline';
  return {
    empty: pictures.filter((e) => box(e).width < 2 || box(e).height < 2).map(said),
    tiny: drawings.filter((e) => box(e).width < .74 * e.naturalWidth).map(said),
    split: cells.filter((e) => lines(e) > 1).map((e) => e.innerText),
    framed: [...main.querySelectorAll('p a')].filter((a) => !a.querySelector('img') && framed(a)
      && !alone(a.closest('p'))).map((a) => a.innerText),
  };
}"""


class Visit:
    "A tab of the browser, with everything that its page said and fetched."
    def __init__(self, browser, url: str, **options):
        self.tab = browser.new_page(**options)
        self.tab.on(
            "console", lambda message: self.said.append(message.text) if message.type in ("error", "warning") else None
        )
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.fetched.append(request.url))
        self.go(url)

    def go(self, url: str) -> None:
        "Open a page, and begin to listen anew."
        self.said, self.fetched = [], []
        self.tab.goto(url)

    def audit(self, width: int, scheme: str) -> dict:
        "What is wrong with the page at that width and in that colour scheme."
        self.tab.set_viewport_size({"width": width, "height": 900})
        self.paint(scheme)
        return self.tab.evaluate(AUDIT)

    def paint(self, scheme: str) -> None:
        "Light or dark; no colour fades from one to the other while we look."
        self.tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        self.tab.wait_for_function(
            "dark => !window.smalldocsToggleScheme || document.documentElement.classList.contains('quarto-dark') ==="
            " dark",
            arg=scheme == "dark",
        )

    def shape(self, width: int) -> dict:
        "How the page lies in a window of that width."
        self.tab.set_viewport_size({"width": width, "height": 900})
        return self.tab.evaluate(LAYOUT)

    def looks(self, width: int) -> dict:
        "How pictures, figures and links look in a window of that width. Unfolds what folds: ask it last."
        self.tab.set_viewport_size({"width": width, "height": 900})
        return self.tab.evaluate(LOOKS)
