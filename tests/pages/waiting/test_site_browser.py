"""The committed site in a real browser: every page, light and dark, at phone and desktop width, and what one does there
with a keyboard."""
import io
import json
import os
import re
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from posixpath import dirname, join, normpath
from threading import Thread
from urllib.parse import urlsplit

import pytest
import yaml

from helpers_site import Visit

DOCS = Path(__file__).parents[3] / "docs"
PAGES = sorted({path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.html")} - {"404.html"})
MOST_BYTES = 2_000_000

SCHEMES = "light", "dark"
UNFOLD = "document.querySelectorAll('main details').forEach((fold) => { fold.open = true; })"
# `make pages` looks at a phone's width and a desk's, `make test-all` at those between and beyond too
EVERY = os.environ.get("SPECDEC_TESTS") == "nightly"
WIDTHS = (390, 992, 1024, 1440) if EVERY else (390, 1440)
PICTURE_WIDTHS = (390, 800, 1280, 1920) if EVERY else (390, 1280)


@pytest.fixture(scope="module")
def audits(browser, site):
    "Every page, loaded once, and looked at in both schemes and in windows of every width."
    found, visit = {}, Visit(browser, "about:blank")
    for page in PAGES:
        visit.go(f"{site}/{page}")
        looks, shapes = [], {}
        for scheme, width in zip(SCHEMES, (360, 1280)):
            looks.append(visit.audit(width, scheme))
            shapes |= {(width, scheme): visit.shape(width) for width in WIDTHS if EVERY or scheme == "light"}
        pictures = {width: visit.looks(width) for width in PICTURE_WIDTHS}
        found[page] = visit.said, visit.fetched, pictures, shapes, looks
    visit.tab.close()
    return found


@pytest.mark.parametrize("page", PAGES)
def test_page_is_quiet_and_light(audits, site, page):
    said, fetched, *_ = audits[page]
    assert said == []
    assert [
        url for url in fetched if urlsplit(url).netloc != urlsplit(site).netloc and not url.startswith("data:")
    ] == []
    paths = {urlsplit(url).path.lstrip("/") for url in fetched if not url.startswith("data:")}
    # what their files weigh: a server that finds the browser's copy fresh sends nothing, and says no length
    assert page in paths and any(path.endswith(".css") for path in paths)
    assert 50_000 < sum((DOCS / path).stat().st_size for path in paths) < MOST_BYTES


@pytest.mark.parametrize("page", PAGES)
def test_page_fits_and_reads_well(audits, page):
    for scheme, seen in zip(("light, 360 px", "dark, 1280 px"), audits[page][-1]):
        assert seen["wide"] <= 0, f"{scheme}: the page scrolls sideways by {seen['wide']} px"
        assert seen["faint"] == [], scheme
        assert seen["skipped"] == [] and seen["titles"] == 1, "headings out of order"
        assert seen["unnamed"] == [] and seen["missing"] == [] and seen["math"] == [] and seen["unlabelled"] == []


@pytest.mark.parametrize("page", PAGES)
def test_page_has_room_to_read(audits, page):
    """Nothing scrolls sideways but on a phone, where it fades; a line holds sixty letters; the page's contents are at
    hand."""
    for (width, scheme), seen in audits[page][-2].items():
        at = f"{width} px, {scheme}"
        assert seen["wide"] <= 0, f"{at}: the page scrolls sideways by {seen['wide']} px"
        assert seen["cut"] == [], f"{at}: reaches beyond the window"
        assert seen["code"] == [] or width < 768, f"{at}: code scrolls sideways: {seen['code']}"
        assert seen["silent"] == [], f"{at}: scrolls sideways, does not show it: {seen['silent']}"
        phone = width < 768 and seen["share"] > .9
        assert seen["column"] >= 60 or phone, f"{at}: {seen['column']:.0f} letters a line"
        assert seen["contents"] in ([None, None], [width == 1440, width != 1440]), at


@pytest.mark.parametrize("page", PAGES)
def test_every_picture_can_be_seen(audits, page):
    """A picture has a size in every window, and a drawing's letters can be read on a phone; a figure and its interval
    stand on one line; a link inside a sentence looks like one."""
    for width, seen in audits[page][-3].items():
        assert seen == {"empty": [], "tiny": [], "split": [], "framed": []}, f"{width} px"


def test_looks_finds_what_it_looks_for(browser, tmp_path):
    "The negative control: a drawing in a box that fits its content, a shrunken one, a split figure, a button in prose."
    (tmp_path / "a.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 300"/>')
    (tmp_path / "bad.html").write_text(
        """<main><details><p style="display:inline-block"><img src="a.svg" style="max-width:100%"></p></details>
        <img src="a.svg" width="100"><table style="width:40px"><td>1.47 (1.28 to 1.58)</table>
        <p>The <strong><a href="#" style="border:1px solid">tour</a></strong> builds it.</p>
        <p><strong><a href="#" style="border:1px solid">Run it</a></strong></p></main>"""
    )
    seen = Visit(browser, (tmp_path / "bad.html").as_uri()).looks(800)
    assert seen == {"empty": ["a.svg"], "tiny": ["a.svg", "a.svg"], "split": ["1.47 (1.28 to 1.58)"],
                    "framed": ["tour"]}


def test_shape_finds_what_it_looks_for(browser, tmp_path):
    "The negative control: a narrow column, code that scrolls and says nothing, a page that scrolls, no contents."
    (tmp_path / "bad.html").write_text(
        """<main style="width:300px"><p>x</p><pre style="overflow-x:auto">"""
        + "x" * 200 + """</pre><div style="width:3000px">wide</div></main>"""
    )
    seen = Visit(browser, (tmp_path / "bad.html").as_uri()).shape(1440)
    assert seen["column"] < 60 and seen["wide"] > 0 and seen["cut"] == ["wide"]
    assert len(seen["code"]) == len(seen["silent"]) == 1
    assert seen["contents"] == [None, None]


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


@pytest.fixture
def front(browser, site):
    "The front page in a wide window."
    visit = Visit(browser, f"{site}/index.html", viewport={"width": 1440, "height": 900})
    yield visit.tab
    assert visit.said == []
    visit.tab.close()


@pytest.mark.parametrize("width, height", [(1440, 900), (390, 844)])
def test_the_first_screen_shows_what_this_is(browser, site, width, height):
    "Without a scroll or a click: what this is, a picture that plays, two buttons; p and q come later, each by name."
    tab = browser.new_page(viewport={"width": width, "height": height})
    tab.goto(f"{site}/index.html")
    first = tab.locator(".first-look")
    parts = [first.locator("p").first, first.locator("img"), first.locator(".choices a").first,
             first.locator(".choices a").last, first.locator("p", has_text="times as fast").first]
    for part in parts: assert part.bounding_box()["y"] + part.bounding_box()["height"] <= height
    assert first.locator(".choices a").count() == 2
    said = tab.locator("main p").filter(has=tab.locator("mi, .mord.mathnormal")).first.inner_text()
    assert all(meant in said for meant in ("target’s own distribution", "drafter’s distribution"))
    assert first.locator("mi, .mord.mathnormal").count() == 0
    tab.close()


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_picture_plays_unless_motion_is_unwanted(browser, site, motion):
    tab = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion=motion)
    tab.goto(f"{site}/index.html")
    picture, seen = tab.locator(".first-look img"), set()
    for _ in range(3):
        seen.add(picture.screenshot())
        tab.wait_for_timeout(1000)
    assert len(seen) == (3 if motion == "no-preference" else 1)
    tab.close()


def hits(tab, query: str) -> list[str]:
    "Where the results of a search lead, best first."
    tab.locator(".site-search input").fill("")
    tab.locator(".site-results").wait_for(state="hidden")
    tab.locator(".site-search input").fill(query)
    tab.locator(".site-results > *").first.wait_for()
    return tab.eval_on_selector_all(".site-results a", "links => links.map(a => a.getAttribute('href').slice(2))")


@pytest.mark.parametrize("query, page", [
    ("install", "index.html#run-it"), ("EAGLE", "drafters/head.html"), ("kvcache", "path/kvcache.html"),
    ("exact", "path/rejection.html"), ("residual", "lossless/verify.html#api-residual"),
    ("vLLM", "use/engines.html#vllm"), ("symbols", "symbols.html"),
    ("playground", "use/playground.html"), ("command line", "use/cli.html"),
    ("top-k", "engine/sampling.html"), ("check_verify", "lossless/check.html#api-check_verify"),
    ("train drafter", "drafters/export.html"), ("Reference", "use/reference.html"), ("speedup", "path/speedup.html"),
])
def test_search_finds_what_one_means(front, query, page):
    assert page in hits(front, query)[:3]


@pytest.mark.parametrize("query, page", [
    ("KV cache", "path/kvcache.html"), ("residual distribution", "path/rejection.html"),
    ("EAGLE", "drafters/head.html"),
    ("acceptance rate", "path/speculative.html"), ("temperature", "path/autoregressive.html"),
    ("bonus token", "path/rejection.html"), ("GPU", "path/gpu.html"), ("batch", "path/batches.html"),
    ("tree", "drafters/trees.html"), ("gpt2", "use/pairs.html"), ("what is speculative decoding", "path/tour.html"),
    ("install", "index.html"), ("rejection sampling", "path/rejection.html"),
])
def test_a_learners_word_leads_to_its_page_first(front, query, page):
    "The page that teaches it, whatever its title, before those that use the word."
    assert hits(front, query)[0].partition("#")[0] == page


def test_a_page_holds_the_terms_by_which_it_is_found():
    "A term leads to no page that doesn't speak of it; and each stands in the index once."
    entries = json.loads((DOCS / "search.json").read_text(encoding="utf-8"))
    terms = yaml.safe_load((DOCS.parent / "nbs" / "sidebar.yml").read_text(encoding="utf-8"))["terms"]
    by_page = {entry["href"]: entry["terms"] for entry in entries if "terms" in entry}
    assert sorted(by_page.values()) == sorted(terms.values())
    for page, some in by_page.items():
        own = [entry for entry in entries if entry["href"].startswith(page)]
        said = " ".join(f"{entry['section']} {entry['text']} {entry['code']}" for entry in own).lower()
        assert [word for word in re.findall(r"[a-z]{4,}", " ".join(some).lower()) if word not in said] == [], page


def test_search_means_whole_words_by_short_ones_and_nothing_by_asking_ones(browser, site):
    "“rate” stands in “generate”, and isn't meant by it; pages of Learn come first of those alike."
    def section(href, text, **more):
        return {"href": href, "page": "A page", "name": href, "section": "A heading", "text": text, "code": "", **more}

    index = [section("inside.html", "generate"), section("whole.html", "the rate"),
             section("learn.html", "a rate", learn=1), section("long.html", "regenerated")]
    tab = browser.new_page(viewport={"width": 1440, "height": 900})
    tab.route("**/search.json", lambda route: route.fulfill(json=index))
    tab.goto(f"{site}/index.html")
    assert hits(tab, "rate") == ["learn.html", "whole.html"]
    assert hits(tab, "generate") == ["inside.html", "long.html"]
    assert hits(tab, "what is the rate") == hits(tab, "rate")
    assert hits(tab, "the") == ["whole.html"]  # of asking words alone, all count
    tab.close()


def test_search_needs_every_word_and_says_when_there_is_none(front):
    assert hits(front, "residual zebra") == []
    assert front.locator(".result-none").is_visible()
    pages = [hit.partition("#")[0] for hit in hits(front, "drafter")]
    assert len(pages) == 12 and max(map(pages.count, pages)) == 2


def test_search_reads_its_index_once(browser, site):
    "However soon one types, and however slowly it comes."
    tab, asked = browser.new_page(), []
    tab.goto(f"{site}/index.html")
    tab.route("**/search.json", lambda route: asked.append(route))
    tab.locator(".site-search input").focus()
    tab.keyboard.type("residual")
    tab.wait_for_timeout(100)
    for route in asked: route.continue_()
    tab.locator(".site-results a").first.wait_for()
    assert len(asked) == 1
    tab.close()


def test_search_puts_prose_before_code(browser, site):
    "Titles first, then text; a section that has a word in its code alone comes last, and shows the word."
    def section(href, text="", code="", heading="A heading"):
        return {"href": href, "page": "A page", "name": href, "section": heading, "text": text, "code": code}

    index = [section("code.html", "of another thing", "import_lookup lookup LookupDrafter", "A drafter"),
             section("half.html", "a drafter", "lookup", "A drafter"), section("text.html", "the lookup of a drafter"),
             section("head.html", "drafter", heading="What lookup is")]
    tab = browser.new_page(viewport={"width": 1440, "height": 900})
    tab.route("**/search.json", lambda route: route.fulfill(json=index))
    tab.goto(f"{site}/index.html")
    assert hits(tab, "lookup") == ["head.html", "text.html", "code.html", "half.html"]
    assert hits(tab, "drafter lookup") == ["head.html", "text.html", "code.html", "half.html"]
    hits(tab, "lookup")
    assert tab.locator(".site-results a").nth(2).locator("mark").all_inner_texts() == ["lookup", "lookup", "Lookup"]
    tab.close()


def test_search_index_is_light():
    assert (DOCS / "search.json").stat().st_size < 1_500_000


@pytest.mark.parametrize("mount", ["/specdec", "", "/a/b"])
def test_an_address_without_a_page_says_so(browser, mount):
    "In any folder, wherever the site is mounted: a page with its style, its search, and the way to all others."
    class Host(SimpleHTTPRequestHandler):
        "A host as code hosts are: below a folder, and with `404.html` in place of what is not there."
        def translate_path(self, path):
            return super().translate_path(path.removeprefix(mount) if path.startswith(f"{mount}/") else "/none")
        def send_error(self, code, *_):
            self.send_response(code)
            self.end_headers()
            if self.command == "GET": self.wfile.write((DOCS / "404.html").read_bytes())
        def log_message(self, *_): "Nothing."

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Host, directory=DOCS)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}{mount}"
        visit = Visit(browser, "about:blank", viewport={"width": 1440, "height": 900})
        visit.go(f"{address}/path/gone/residual.html")
        assert visit.tab.title().startswith("Nothing is at this address")
        if mount == "/specdec":  # where it was published: only the address itself isn't there
            assert all(url.startswith(f"{address}/") for url in visit.fetched if not url.startswith("data:"))
            assert len(visit.said) == 1 and "404" in visit.said[0]
        assert visit.tab.evaluate("document.querySelector('base').href") == f"{address}/"
        assert visit.tab.locator("#quarto-sidebar").evaluate("e => getComputedStyle(e).position") == "sticky"
        for scheme, width in zip(SCHEMES, (360, 1280)):
            seen = visit.audit(width, scheme)
            assert seen["wide"] <= 0 and seen["titles"] == 1
            assert seen["faint"] == seen["missing"] == seen["unlabelled"] == []
        assert hits(visit.tab, "residual")
        visit.tab.locator("main").get_by_role("link", name="Start here").click()
        visit.tab.wait_for_url(f"{address}/index.html")
        visit.tab.close()
        server.shutdown()


def test_that_page_has_its_style_where_the_site_is_served_alone(browser, site):
    "At the root of a server, as on one's own machine."
    tab = browser.new_page()
    tab.goto(f"{site}/404.html", wait_until="load")
    assert tab.evaluate("getComputedStyle(document.body).getPropertyValue('--stripe')")  # of styles.css
    tab.locator("main").get_by_role("link", name="Start here").click()
    tab.wait_for_url(f"{site}/index.html")
    tab.close()


def test_search_by_keyboard_leads_to_the_page(front):
    front.keyboard.press("/")
    front.keyboard.type("accept or resample")
    front.locator(".site-results a").first.wait_for()
    assert front.locator(".site-results mark").count() > 2
    front.keyboard.press("ArrowDown")
    front.keyboard.press("Enter")
    front.wait_for_url("**/path/rejection.html*")


def test_skip_link_leads_past_the_sidebar(front):
    front.keyboard.press("Tab")
    skip = front.locator(".site-skip")
    assert skip.evaluate("e => e === document.activeElement") and skip.bounding_box()["x"] >= 0
    front.keyboard.press("Enter")
    front.keyboard.press("Tab")
    assert front.evaluate("document.querySelector('main').contains(document.activeElement)")
    assert skip.bounding_box()["x"] < 0  # out of sight again


@pytest.mark.parametrize("width", [390, 1024, 1280])
def test_contents_fold_into_a_button(browser, site, width):
    tab = browser.new_page(viewport={"width": width, "height": 900}, reduced_motion="reduce")
    tab.goto(f"{site}/path/rejection.html")
    button, contents = tab.locator(".page-contents > summary"), tab.locator(".page-contents nav")
    assert button.inner_text() == "Contents" and not contents.is_visible()
    button.click()
    box = contents.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    tab.keyboard.press("Escape")
    assert not contents.is_visible()
    button.click()
    contents.get_by_role("link", name="Two areas").click()
    assert tab.url.endswith("#two-areas") and not contents.is_visible()
    heading = tab.get_by_role("heading", name="Two areas").bounding_box()["y"]
    assert tab.locator(".site-bar").bounding_box()["height"] < heading < 200  # not hidden under the bar
    tab.close()


@pytest.mark.parametrize("width", [390, 1024])
def test_all_pages_fold_into_a_menu(browser, site, width):
    tab = browser.new_page(viewport={"width": width, "height": 900}, reduced_motion="reduce")
    tab.goto(f"{site}/path/rejection.html")
    menu, sidebar = tab.locator(".site-menu"), tab.locator("#quarto-sidebar")
    assert not sidebar.is_visible() and menu.get_attribute("aria-expanded") == "false"
    menu.click()
    assert sidebar.is_visible() and menu.get_attribute("aria-expanded") == "true"
    assert sidebar.evaluate("e => e.contains(document.activeElement)")
    tab.wait_for_function("() => document.querySelector('#quarto-sidebar').getBoundingClientRect().left === 0")
    box, height = sidebar.bounding_box(), tab.viewport_size["height"]
    assert (box["y"], box["height"]) == (0, height)  # it ends where the window does
    tab.keyboard.press("Escape")
    sidebar.wait_for(state="hidden")
    tab.locator(".site-find").click()
    assert sidebar.is_visible() and tab.evaluate("document.activeElement.type") == "search"
    tab.close()


def test_sidebar_speaks_to_people(front):
    "Three doors, with a line on what is behind each; the one open where one is; no page has two names."
    doors = front.locator("#quarto-sidebar > ul > li > details > summary")
    assert [words.split("\n")[0] for words in doors.all_inner_texts()] == [
        "Learn", "Go deeper", "How the package is built"]
    assert all("\n" in words for words in doors.all_inner_texts())
    front.get_by_role("link", name="Why it is exact", exact=True).first.click()
    assert front.url.endswith("path/rejection.html") and front.title() == "Why it is exact – specdec"
    assert front.locator("h1").inner_text() == "Why it is exact"
    assert front.locator("[aria-current=page]").inner_text() == "3 Why it is exact"  # a step has its number
    assert front.locator("main .breadcrumb-item").all_inner_texts() == ["Learn", "Step 3: Why it is exact"]
    assert front.locator("#quarto-sidebar details[open]").count() == 1
    front.goto(front.url.replace("path/rejection", "lossless/verify"))
    assert front.locator("main p code").first.inner_text() == "specdec.verify"  # what a page builds stands in its head


def test_behind_the_last_door_pages_stand_in_sections_with_their_modules(browser, site):
    tab = browser.new_page(viewport={"width": 1440, "height": 900})
    tab.goto(f"{site}/engine/layouts.html")
    assert tab.locator("[aria-current=page]").inner_text().split("\n") == ["How a CPU multiplies", "models.linear"]
    assert [words.split("\n")[0] for words in tab.locator("#quarto-sidebar details[open] > summary").all_inner_texts()
            ] == ["How the package is built", "Models"]
    assert tab.locator("main .breadcrumb-item").all_inner_texts() == [
        "How the package is built", "Models", "How a CPU multiplies"]
    tab.close()


def test_scheme_toggle_changes_and_stays(browser, site):
    "It shows by an icon what one gets: a moon in the light, a sun in the dark."
    context = browser.new_context(color_scheme="light", viewport={"width": 1440, "height": 900})
    tab = context.new_page()
    background = "getComputedStyle(document.body).backgroundColor"
    tab.goto(f"{site}/index.html")
    light, button = tab.evaluate(background), tab.locator("#quarto-sidebar .site-scheme")
    moon, sun = button.locator(".bi-moon-stars"), button.locator(".bi-sun")
    assert moon.is_visible() and not sun.is_visible() and moon.bounding_box()["width"] > 10
    button.click()
    tab.wait_for_function(f"{background} !== '{light}'")
    sun.wait_for()
    assert not moon.is_visible()
    tab.goto(f"{site}/engine/result.html")
    tab.wait_for_function("document.documentElement.classList.contains('quarto-dark')")
    assert tab.evaluate(background) != light
    context.close()


def test_every_icon_has_its_sign(front):
    signs = front.eval_on_selector_all(".bi", "all => all.map(e => getComputedStyle(e, '::before').content)")
    assert len(signs) > 5 and all(len(sign) == 3 for sign in signs)  # a letter of the icons' font, in quotes


@pytest.mark.parametrize("page", ["path/rejection.html", "path/speedup.html", "path/tour.html"])
def test_figures_follow_the_scheme(browser, site, page):
    from PIL import Image
    visit = Visit(browser, f"{site}/{page}", viewport={"width": 1440, "height": 900})
    visit.tab.evaluate(UNFOLD)
    figure, paper = visit.tab.locator("main .cell-output img").first, {}
    for scheme in SCHEMES:
        visit.paint(scheme)
        paper[scheme] = Image.open(io.BytesIO(figure.screenshot())).convert("L").getpixel((5, 5))
    visit.tab.close()
    assert paper["light"] > 240 and paper["dark"] < 50


def test_figures_on_a_phone_are_not_shrunk_away(browser, site):
    "Their letters stay three quarters of their size: a figure scrolls inside its box instead."
    tab = browser.new_page(viewport={"width": 390, "height": 900})
    tab.goto(f"{site}/path/rejection.html")
    tab.evaluate(UNFOLD)
    shares = tab.eval_on_selector_all(
        "main .cell-output img", "all => all.map(e => e.clientWidth / parseFloat(e.style.getPropertyValue('--drawn')))")
    assert len(shares) > 1 and min(shares) >= .74
    tab.close()


def test_previous_and_next_visit_every_page_once(browser, site):
    context, page, seen = browser.new_context(), "index.html", []
    while page:
        seen.append(page)
        answer = context.request.get(f"{site}/{page}")
        assert answer.ok
        following = re.findall(r'nav-page-next">\s*<a href="([^"]+)"', answer.text())
        page = normpath(join(dirname(page), following[0])) if following else None
    sidebar = (DOCS.parent / "nbs" / "sidebar.yml").read_text(encoding="utf-8")
    unlisted = set(re.findall(r"href: (\S+)\.ipynb", sidebar.partition("unlisted:")[2]))  # outside the chain
    left = {page for page in PAGES if page.removesuffix(".html") in {re.sub(r"/\d+_", "/", name) for name in unlisted}}
    assert len(left) == len(unlisted) and sorted({*seen} | left) == PAGES and not left & {*seen}
    assert len(seen) == len({*seen})
    context.close()


@pytest.mark.parametrize("width, height", [(390, 844), (1440, 900)])
@pytest.mark.parametrize("page, tool", [
    ("live.html", ".live-fetch"), ("live.html", ".live-status"), ("live.html", ".live-track"),
    ("use/touch.html", ".touch-drag .touch-column"), ("use/recorded.html", ".recorded-caption"),
])
def test_a_pages_tool_stands_in_its_first_screen(browser, site, page, tool, width, height):
    "The words come after it."
    tab = browser.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce")
    tab.goto(f"{site}/{page}")
    tab.wait_for_selector("[data-ready]")
    tab.locator(tool).first.wait_for()
    box = tab.locator(tool).first.bounding_box()
    assert 0 <= box["y"] and box["y"] + box["height"] <= height
    tab.close()


def test_no_cell_is_a_header_of_nothing():
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        assert not re.search(r"<th\b[^>]*>\s*</th>", text), page


def test_what_a_program_prints_wraps_on_a_phone(browser, site):
    "The word that decides stands at the end of the line."
    tab, outputs = browser.new_page(viewport={"width": 390, "height": 844}), 0
    for page in sorted((DOCS / "path").glob("*.html")):
        tab.goto(f"{site}/path/{page.name}")
        tab.evaluate(UNFOLD)
        over = tab.eval_on_selector_all(".cell-output > pre", "all => all.map(e => e.scrollWidth - e.clientWidth)")
        assert max(over) <= 1, page.name
        outputs += len(over)
    assert outputs > 50
    tab.close()


def test_the_whole_table_fits_its_column(browser, site):
    tab = browser.new_page(viewport={"width": 1440, "height": 900})
    tab.goto(f"{site}/bench/table.html")
    rooms = tab.eval_on_selector_all("main table", """all => all.map(
        e => e.scrollWidth - e.clientWidth + e.parentElement.scrollWidth - e.parentElement.clientWidth)""")
    assert len(rooms) > 5 and max(rooms) <= 1
    tab.close()


def test_the_contents_take_the_focus_and_give_it_back(browser, site):
    "One sees where one is in them; Escape leads back to the button."
    tab = browser.new_page(viewport={"width": 1440, "height": 900})
    tab.goto(f"{site}/path/rejection.html")
    tab.locator("#TOC a").first.focus()
    tab.keyboard.press("Tab")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.locator(".page-contents > summary").focus()
    tab.keyboard.press("Enter")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.closest('.page-contents nav') !== null")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.textContent") == "Contents"
    tab.close()


# Where a reader is asked to predict

@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without"])
def test_an_answer_is_shown_when_asked_for(browser, site, scripts):
    "By keyboard as by mouse; the words on the key are the same without scripts."
    context = browser.new_context(java_script_enabled=scripts, reduced_motion="reduce")
    tab = context.new_page()
    tab.goto(f"{site}/path/tour.html")
    asked = tab.locator("main p", has_text="How many now?")
    answer = tab.locator("main details.predict").nth(1)
    out = answer.get_by_text("guesses: 6 forwards")
    assert asked.is_visible() and not out.is_visible()
    assert tab.get_by_text("Repeat this text word by word", exact=False).first.is_visible()  # the code is no secret
    answer.locator("summary").first.press("Enter")
    out.wait_for()
    assert asked.bounding_box()["y"] < out.bounding_box()["y"]
    context.close()


# The tour's sliders

def test_the_sliders_of_the_tour_play_what_was_recorded(browser, site):
    data = json.loads((DOCS / "data" / "knobs.json").read_text(encoding="utf-8"))
    tab = browser.new_page(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
    tab.goto(f"{site}/path/tour.html")
    tab.wait_for_selector(".knobs[data-ready]")
    box = tab.locator(".knobs")
    K, T = box.get_by_label("K", exact=True), box.get_by_label("temperature", exact=True)

    def shown(k: int, t: int) -> None:
        rounds = data["runs"][t][k]
        assert tab.text_content(".knobs-text") == "".join(data["tokens"][i] for r in rounds for i in r)
        assert box.locator(".status-corrected").count() == len(rounds)
        assert box.locator(".status-accepted").count() == 48 - len(rounds)
        words = f"K = {data['Ks'][k]}, temperature {data['temperatures'][t]:.1f}: 48 tokens in {len(rounds)} rounds"
        assert tab.inner_text(".knobs-head").startswith(words)
        assert (K.get_attribute("aria-valuetext"), T.get_attribute("aria-valuetext")) == (
            str(data["Ks"][k]), f"{data['temperatures'][t]:.1f}")

    shown(4, 0)
    last = len(data["Ks"]) - 1
    K.press("End")
    shown(last, 0)
    height = box.bounding_box()["height"]
    for t in range(1, len(data["temperatures"])):
        T.press("ArrowRight")
        shown(last, t)
        assert box.bounding_box()["height"] == pytest.approx(height, abs=.5)  # nothing below moves
    K.press("Home")
    shown(0, t)
    tab.close()


# The race on the page of recorded runs

def test_the_race_shows_what_was_recorded(browser, site):
    data = json.loads((DOCS / "data" / "race.json").read_text(encoding="utf-8"))
    tab = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    tab.goto(f"{site}/use/recorded.html")
    tab.wait_for_selector(".race[data-ready]")
    assert tab.inner_text(".race-button") == "Play"  # whoever asked for less motion gets the end, standing still
    for race in data["races"]:
        tab.locator(".race").get_by_label("Temperature").select_option(str(race["temperature"]).removesuffix(".0"))
        for K in data["Ks"]:
            tab.locator(".race").get_by_label("K, draft tokens").select_option(str(K))
            plain, speculative = race["lanes"]["plain"], race["lanes"][str(K)]
            texts = ["".join(token for r in lane for token in r["text"]) for lane in (plain, speculative)]
            assert [tab.text_content(f".race-{name} .race-text") for name in ("plain", "speculative")] == texts
            assert texts[0] == texts[1]
            n, gain = sum(len(r["text"]) for r in plain), plain[-1]["end"] / speculative[-1]["end"]
            words = f"The same text: {n} tokens in {len(speculative)} forwards instead of {len(plain)}, {gain:.2f} ×"
            assert words in tab.inner_text(".race-result")
            assert all(text.endswith("<|im_end|>") for text in texts)  # whole
    assert data["prompt"] in tab.inner_text(".race-prompt") and data["drafter"] in tab.inner_text(".race-prompt")
    tab.goto(f"{site}/index.html")
    assert tab.locator(".choices a").first.bounding_box()["y"] < 900  # without scrolling
    tab.close()


def test_the_race_plays_by_itself_and_can_be_stopped(browser, site):
    tab = browser.new_page(reduced_motion="no-preference")
    tab.goto(f"{site}/use/recorded.html")
    tab.wait_for_function("() => document.querySelector('.race-speculative .race-text')?.textContent.length > 20")
    tab.click(".race-button")
    before = tab.text_content(".race-plain .race-clock")
    tab.wait_for_timeout(400)
    assert tab.inner_text(".race-button") == "Play" and tab.text_content(".race-plain .race-clock") == before
    tab.get_by_label("quarter speed").check()
    tab.locator(".race").get_by_label("K, draft tokens").select_option("8")
    tab.locator(".race").get_by_label("Temperature").select_option("1")
    tab.click(".race-button")
    tab.wait_for_selector(".race-speculative .race-fallen")  # a rejected token stands there, until the next round
    played = """() => new Promise(done => {
      const at = () => Number(document.querySelector('.race-plain .race-clock').textContent.match(/([\\d.]+) s$/)[1]);
      const before = at(), start = performance.now();
      setTimeout(() => done((at() - before) / (performance.now() - start) * 1000), 2000);
    })"""
    assert .1 < tab.evaluate(played) < .4  # of its own time, a quarter
    tab.close()


def test_without_scripts_a_picture_of_the_race_stands_there(browser, site):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(f"{site}/use/recorded.html")
    assert tab.locator(".race img").is_visible()
    context.close()
