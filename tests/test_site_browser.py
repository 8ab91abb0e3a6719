"""The committed site in a real browser: every page, light and dark, at phone and desktop width, and the sliders by
keyboard."""
import json
import re
from pathlib import Path
from posixpath import dirname, join, normpath
from urllib.parse import urlsplit

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.html"))
MOST_BYTES = 2_000_000

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
  const faint = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, words = walker.currentNode.textContent.trim();
    const aside = element.closest('script, style, .katex-mathml, [aria-hidden=true], :disabled');
    if (!words || aside || !element.checkVisibility({visibilityProperty: true})) continue;
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
    unlabelled: [...document.querySelectorAll('button, input, select, a[href]')].filter((e) => e.checkVisibility() &&
      !(e.innerText || e.value || '').trim() && !e.title && !e.ariaLabel && !e.placeholder
      && !(e.labels && e.labels.length) && !e.querySelector('img[alt]')).map((e) => e.outerHTML.slice(0, 80)),
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
        self.tab.on("response", self.weigh)
        self.go(url)

    def go(self, url: str) -> None:
        "Open a page, and begin to listen anew."
        self.said, self.fetched, self.bytes = [], [], 0
        self.tab.goto(url)

    def weigh(self, response) -> None:
        "Add what a file server says it sends."
        self.bytes += int(response.headers.get("content-length", 0))

    def audit(self, width: int, scheme: str) -> dict:
        "What is wrong with the page at that width and in that colour scheme."
        self.tab.set_viewport_size({"width": width, "height": 900})
        # no colour fades from one to the other while we look
        self.tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        self.tab.wait_for_function(
            "dark => !window.smalldocsToggleScheme || document.documentElement.classList.contains('quarto-dark') ==="
            " dark",
            arg=scheme == "dark",
        )
        return self.tab.evaluate(AUDIT)


@pytest.fixture(scope="module")
def audits(browser, site):
    "Every page, loaded once, and looked at both ways: narrow and light, wide and dark."
    found, visit = {}, Visit(browser, "about:blank")
    for page in PAGES:
        visit.go(f"{site}/{page}")
        looks = visit.audit(360, "light"), visit.audit(1280, "dark")
        found[page] = visit.said, visit.fetched, visit.bytes, looks
    visit.tab.close()
    return found


@pytest.mark.parametrize("page", PAGES)
def test_page_is_quiet_and_light(audits, site, page):
    said, fetched, size, _ = audits[page]
    assert said == []
    assert [
        url for url in fetched if urlsplit(url).netloc != urlsplit(site).netloc and not url.startswith("data:")
    ] == []
    assert 50_000 < size < MOST_BYTES


@pytest.mark.parametrize("page", PAGES)
def test_page_fits_and_reads_well(audits, page):
    for scheme, seen in zip(("light, 360 px", "dark, 1280 px"), audits[page][-1]):
        assert seen["wide"] <= 0, f"{scheme}: the page scrolls sideways by {seen['wide']} px"
        assert seen["faint"] == [], scheme
        assert seen["skipped"] == [] and seen["titles"] == 1, "headings out of order"
        assert seen["unnamed"] == [] and seen["missing"] == [] and seen["math"] == [] and seen["unlabelled"] == []


def test_audit_finds_what_it_looks_for(browser, tmp_path):
    "The negative control: a page with one of each fault."
    (tmp_path / "bad.html").write_text(
        """<main><h1>x</h1><h3>y</h3><p style="color:#999;background:#fff">faint</p><img src="none.png">
        <p style="opacity:.5">half</p><div style="width:3000px">wide</div><input type="range"></main>"""
    )
    visit = Visit(browser, (tmp_path / "bad.html").as_uri())
    seen = visit.audit(360, "light")
    assert (
        seen["wide"] > 0
        and len(seen["faint"]) == 2
        and seen["skipped"] == [[3, 1]]
        and len(seen["unnamed"]) == len(seen["missing"]) == 1
    )
    assert visit.said and visit.fetched


def words(tab, selector: str) -> str:
    "What a reader sees there."
    return tab.locator(selector).first.inner_text()


def test_recorded_runs_read_well_in_both_schemes_and_widths(browser, site):
    visit = Visit(browser, f"{site}/use/recorded.html")
    visit.tab.wait_for_selector(".recorded[data-ready]")
    for width, scheme in [(360, "dark"), (360, "light"), (1280, "light")]:
        seen = visit.audit(width, scheme)
        assert seen["wide"] <= 0 and seen["faint"] == [] and seen["unlabelled"] == []


def test_without_script_there_is_a_picture(browser, site):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(f"{site}/use/recorded.html")
    picture = tab.locator(".recorded img")
    assert (
        picture.is_visible() and len(picture.get_attribute("alt")) > 40 and tab.locator(".recorded input").count() == 0
    )
    context.close()


def test_lost_data_leaves_the_picture_and_says_so(browser, site):
    tab = browser.new_page()
    tab.route("**/recorded.json", lambda route: route.fulfill(status=404, body="gone"))
    tab.goto(f"{site}/use/recorded.html", wait_until="networkidle")
    assert tab.locator(".recorded img").is_visible() and "could not be loaded" in words(tab, ".recorded [role=status]")
    tab.close()


def test_search_finds_and_leads(browser, site):
    visit = Visit(browser, f"{site}/index.html", viewport={"width": 1280, "height": 900})
    visit.tab.locator("input[type=search], .sidebar-search input").first.fill("residual")
    result = visit.tab.locator(".smalldocs-search-results a").first
    result.wait_for()
    result.click()
    visit.tab.wait_for_load_state()
    assert not visit.tab.url.endswith("index.html") and visit.said == []
    visit.tab.close()


def test_scheme_toggle_changes_and_stays(browser, site):
    context = browser.new_context(color_scheme="light", viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    background = "getComputedStyle(document.body).backgroundColor"
    tab.goto(f"{site}/index.html")
    light = tab.evaluate(background)
    tab.locator(".quarto-color-scheme-toggle").first.click()
    tab.wait_for_function(f"{background} !== '{light}'")
    tab.goto(f"{site}/engine/core.html")
    tab.wait_for_function("document.documentElement.classList.contains('quarto-dark')")
    assert tab.evaluate(background) != light
    context.close()


def test_previous_and_next_visit_every_page_once(browser, site):
    context, page, seen = browser.new_context(), "index.html", []
    while page:
        seen.append(page)
        answer = context.request.get(f"{site}/{page}")
        assert answer.ok
        following = re.findall(r'nav-page-next">\s*<a href="([^"]+)"', answer.text())
        page = normpath(join(dirname(page), following[0])) if following else None
    assert sorted(seen) == PAGES
    context.close()


# The race on the front page

def test_the_race_shows_what_was_recorded(browser, site):
    data = json.loads((DOCS / "data" / "race.json").read_text(encoding="utf-8"))
    tab = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    tab.goto(f"{site}/index.html")
    tab.wait_for_selector(".race[data-ready]")
    assert tab.inner_text(".race-button") == "Play"  # whoever asked for less motion gets the end, standing still
    for race in data["races"]:
        tab.get_by_label("Temperature").select_option(str(race["temperature"]).removesuffix(".0"))
        for K in data["Ks"]:
            tab.get_by_label("K, draft tokens").select_option(str(K))
            plain, speculative = race["lanes"]["plain"], race["lanes"][str(K)]
            said = "".join(token for r in speculative for token in r["text"])
            assert tab.text_content(".race-speculative .race-text") == said
            gain = plain[-1]["end"] / speculative[-1]["end"]
            words = f"{len(speculative)} forwards instead of {len(plain)}, {gain:.2f} ×"
            assert words in tab.inner_text(".race-result")
    assert tab.get_by_role("link", name="Read it in one sitting").bounding_box()["y"] < 900  # without scrolling
    tab.close()


def test_the_race_plays_by_itself_and_can_be_stopped(browser, site):
    tab = browser.new_page(reduced_motion="no-preference")
    tab.goto(f"{site}/index.html")
    tab.wait_for_function("() => document.querySelector('.race-speculative .race-text')?.textContent.length > 20")
    tab.click(".race-button")
    before = tab.text_content(".race-plain .race-clock")
    tab.wait_for_timeout(400)
    assert tab.inner_text(".race-button") == "Play" and tab.text_content(".race-plain .race-clock") == before
    tab.close()


def test_without_scripts_a_picture_of_the_race_stands_there(browser, site):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(f"{site}/index.html")
    assert tab.locator(".race img").is_visible()
    context.close()
