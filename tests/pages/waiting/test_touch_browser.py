"""The page that one can touch, in a real browser: its numbers are Python's, a broken rule settles beside p, and it can
be used by mouse, by finger, by keyboard and by ear."""
import random
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from helpers_site import Visit
from specdec.panel.touch import (
    PLACES,
    RULES,
    Course,
    dragged,
    fractions,
    pulled,
    race_rounds,
    shared,
    total_variation,
    touch_counts,
    touch_law,
)

DOCS = Path(__file__).parents[3] / "docs"
NAMES = list(PLACES)
STILL = dict(reduced_motion="reduce", viewport={"width": 1440, "height": 900})
WIDTHS = (390, 768, 1440)


@pytest.fixture(scope="module")
def page(browser, site):
    "One tab for all: a new address is a new state, without another visit."
    tab = browser.new_page(**STILL)
    tab.said = []
    tab.on("console", lambda message: tab.said.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: tab.said.append(str(error)))
    tab.goto(f"{site}/use/touch.html")
    tab.wait_for_selector(".touch[data-ready]")
    yield tab
    assert tab.said == []
    tab.close()


def state(row=0, q=None, rule="exact", n=0, K=4, c=0.05, e=0.03) -> dict:
    "What the address says."
    return {"row": row, "q": list(q or PLACES[NAMES[row]].q), "rule": rule, "n": n, "K": K, "c": c, "e": e}


def address(at: dict) -> str:
    "The state as the address has it."
    return "&".join(f"{key}={'.'.join(map(str, value)) if key == 'q' else value}" for key, value in at.items())


GO = """words => new Promise(done => {
  if (location.hash === `#${words}`) return done();
  addEventListener('hashchange', done, {once: true});
  location.hash = words;
})"""


def show(tab, at: dict) -> None:
    "Lead the tab to a state."
    tab.evaluate(GO, address(at))


def now(tab) -> dict:
    "The state that the address keeps."
    found = {name: value for name, (value,) in parse_qs(urlsplit(tab.url).fragment).items()}
    return {name: [int(x) for x in value.split(".")] if name == "q" else value if name == "rule" else float(value)
            for name, value in found.items()}


VALUES = """() => Object.fromEntries([...document.querySelectorAll('.touch [data-value]')].map((e, i) =>
  [e.classList.contains('touch-number') ? `law ${i}` : e.className.split(' ').at(-1),
   [e.dataset.value === '' ? null : Number(e.dataset.value), e.textContent]]))"""
ROUNDS = "() => [...document.querySelectorAll('.touch-race .touch-track')[1].children].map(e => e.textContent)"


def values(tab) -> dict:
    "Every figure of the page, to all its digits, and as it is written."
    return tab.evaluate(VALUES)


def random_states(n: int) -> list[dict]:
    "States all over, and q with zeros in them; some of the throws."
    rng, found = random.Random(38), []
    for _ in range(n):
        q = shared([rng.choice([0, 1, 1]) * rng.randint(0, 99) for _ in range(5)] + [rng.randint(1, 99)], 1000)
        found.append(state(rng.randrange(len(NAMES)), q, rng.choice(list(RULES)), rng.choice([0, 1, 7, 1000]),
                           rng.randint(1, 16), rng.randint(0, 1000) / 1000, rng.randint(0, 1000) / 1000))
    return found


def test_the_numbers_are_pythons_for_a_hundred_states(page):
    states = random_states(100)
    pages = page.evaluate(f"""async (states) => {{
      const found = [];
      for (const words of states) {{
        await ({GO})(words);
        found.push([({VALUES})(), ({ROUNDS})()]);
      }}
      return found;
    }}""", list(map(address, states)))
    for at, (found, rounds) in zip(states, pages, strict=True):
        p, q, n = PLACES[NAMES[at["row"]]].p, at["q"], at["n"]
        law, course, alpha = touch_law(at["rule"], p, q), Course(at["K"], at["c"], at["e"]), sum(map(min, p, q)) / 1000
        words = [value for name, value in found.items() if name.startswith("law")]
        assert [value for value, _ in words] == pytest.approx(law.astype(float).tolist(), abs=1e-12), at
        assert found["touch-alpha"] == [alpha, f"{alpha:.3f}"]
        off, (value, written) = float(total_variation(law, fractions(p))), found["touch-exact"]
        assert value == pytest.approx(off, abs=1e-12), at
        assert written == "0" if off == 0 else abs(float(written) - off) < 5.1e-5
        counts, kept = touch_counts(at["rule"], p, q, n)
        assert [shown for _, shown in words] == ([f"{count / n:.3f}" for count in counts] if n else ["–"] * 6), at
        assert found["touch-share"][0] == (pytest.approx(kept / n) if n else None)
        assert found["touch-speed"][0] == pytest.approx(course.speedup(alpha), rel=1e-12), at
        assert found["touch-best"][0] == course.best(alpha), at
        assert [int(x) - 1 for x in rounds if x] == race_rounds(alpha, at["K"]), at


def test_dragging_is_pythons_too(page):
    "Twenty keys on random words, and α on its slider."
    rng = random.Random(1)
    for at in random_states(5):
        show(page, at)
        place = PLACES[NAMES[at["row"]]]
        for key, step in [("ArrowUp", 10), ("PageDown", -100), ("End", 1000), ("ArrowDown", -10)]:
            q, word = now(page)["q"], rng.randrange(6)
            page.locator(".touch-drag [role=slider]").nth(word).press(key)
            assert now(page)["q"] == dragged(q, word, min(1000, max(0, q[word] + step)))
        q, alpha = now(page)["q"], rng.randint(min(place.p), 1000)
        page.get_by_label("α, the share kept").evaluate(
            "(e, to) => { e.value = to; e.dispatchEvent(new Event('input')); }", alpha)
        assert now(page)["q"] == pulled(place.p, q, alpha)
        assert values(page)["touch-alpha"][0] == alpha / 1000


@pytest.mark.parametrize("how", ["mouse", "touch"])
def test_a_pointer_drags_q(browser, site, how):
    "And the same drag back restores it, for the others keep their proportions while it is held."
    context = browser.new_context(**STILL, has_touch=how == "touch")
    tab = context.new_page()
    tab.goto(f"{site}/use/touch.html#n=10000")
    tab.wait_for_selector(".touch[data-ready]")
    column = tab.locator(".touch-drag .touch-column").nth(3)
    column.scroll_into_view_if_needed()
    box, q = column.bounding_box(), list(PLACES["doing"].q)
    x = box["x"] + box["width"] / 2

    def y(height): return box["y"] + box["height"] * (1 - height)
    if how == "mouse":
        tab.mouse.move(x, y(.2))
        tab.mouse.down()
        tab.mouse.move(x, y(.75))
        wide = now(tab)["q"]
        tab.mouse.move(x, y(q[3] / 1000))
        tab.mouse.up()
        assert abs(now(tab)["q"][3] - q[3]) < 10
        tab.mouse.move(x, y(.9))
        assert abs(now(tab)["q"][3] - q[3]) < 10  # let go
    else:
        tab.touchscreen.tap(x, y(.75))
        wide = now(tab)["q"]
    assert abs(wide[3] - 750) < 10 and wide == dragged(q, 3, wide[3])
    assert now(tab)["n"] == 10000 and values(tab)["touch-found"][0] < .02  # the histogram stood at p all the while
    context.close()


def test_a_thumb_that_scrolls_moves_no_bar_and_one_on_the_grip_does(browser, site):
    "On the bars and on the map the page scrolls, and q stays; the grip is what a finger drags."
    context = browser.new_context(reduced_motion="reduce", has_touch=True, viewport={"width": 390, "height": 844})
    tab = context.new_page()
    tab.goto(f"{site}/use/touch.html")
    tab.wait_for_selector(".touch[data-ready]")
    hand, before = context.new_cdp_session(tab), tab.evaluate("location.hash")

    def swipe(selector: str, nth: int = 0) -> int: # pixels that the page went down
        "A finger goes up by 120 pixels from the middle of that."
        there = tab.locator(selector).nth(nth)
        there.scroll_into_view_if_needed()
        box, start = there.bounding_box(), tab.evaluate("scrollY")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind, ys in (("touchStart", [y]), ("touchMove", [y - 10 * n for n in range(1, 13)])):
            for at in ys:
                hand.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": at}]})
                tab.wait_for_timeout(16)
        hand.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        tab.wait_for_timeout(200)
        return tab.evaluate("scrollY") - start

    for selector, nth in ((".touch-drag .touch-column", 4), (".touch-field", 0)):
        assert swipe(selector, nth) > 60 and tab.evaluate("location.hash") == before, selector
    assert swipe(".touch-drag .touch-grip", 1) == 0 and now(tab)["q"][1] > PLACES["doing"].q[1] + 400
    context.close()


def test_both_histograms_have_one_scale(page):
    "p is as high on the left as on the right."
    for row in range(len(NAMES)):
        show(page, state(row))
        left, right = (page.eval_on_selector_all(
            f".touch-{name} .touch-column .touch-part.touch-p", "all => all.map(e => e.getBoundingClientRect().height)")
            for name in ("drag", "throw"))
        assert left == pytest.approx(right, abs=1)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_third_panel_stays_where_it_is(page, width):
    "Whatever is thrown, dragged and broken above it; and its own parts, whatever point is loaded."
    page.set_viewport_size({"width": width, "height": 900})
    seen, states = {"race": set(), "ladder": set()}, random_states(30) + [state(), state(n=1), state(n=200000)]
    for at in states:
        show(page, at)
        tops = page.evaluate("""() => {
          const top = (name) => Math.round(document.querySelector(name).getBoundingClientRect().top + scrollY);
          const race = top(".touch-race");
          return [race, top(".touch-ladder") - race, top(".touch-map") - race];
        }""")
        seen["race"].add(tops[0])
        seen["ladder"].add(tuple(tops[1:]))
    page.set_viewport_size({"width": 1440, "height": 900})
    assert len(seen["race"]) == len(seen["ladder"]) == 1, seen


def test_a_race_runs_when_it_is_asked_for(page, browser, site):
    "Both lanes on one clock; with less motion they stand."
    name = "e => getComputedStyle(e).animationName"
    page.get_by_role("button", name="Race", exact=True).click()
    assert page.locator(".touch-lane").first.evaluate(name) == "none"
    tab = browser.new_page(reduced_motion="no-preference")
    tab.goto(f"{site}/use/touch.html")
    tab.wait_for_selector(".touch[data-ready]")
    assert tab.locator(".touch-lane").first.evaluate(name) == "none"
    tab.get_by_role("button", name="Race", exact=True).click()
    for n in (0, 1): assert tab.locator(".touch-lane").nth(n).evaluate(name) == "touch-run"
    time = "e => e.getAnimations().map(a => [a.currentTime, a.effect.getTiming().duration])"
    both = [tab.locator(".touch-lane").nth(n).evaluate(time) for n in (0, 1)]
    assert both[0][0][1] == both[1][0][1] and both[0][0][0] == pytest.approx(both[1][0][0], abs=200)
    tab.close()


def test_nothing_is_said_of_throws_before_any(page):
    show(page, state())
    assert page.inner_text(".touch-throw .touch-verdict").startswith("Predict")
    page.get_by_role("button", name="×100", exact=True).click()
    assert "the same throws" in page.inner_text(".touch-throw .touch-verdict")


@pytest.mark.parametrize("wrong", ["as it was", "as wrong as can be", "= p"])
def test_the_histogram_settles_at_p_whatever_q_is(page, wrong):
    show(page, state(1))
    page.get_by_role("button", name=f"q {wrong}").click()
    for _ in range(3): page.get_by_role("button", name="×10,000").click()
    found = values(page)
    assert found["touch-n"] == [30000, "30,000 thrown"] and found["touch-exact"] == [pytest.approx(0, abs=1e-12), "0"]
    assert found["touch-found"][0] < .01
    share = {"as it was": .605, "as wrong as can be": 0, "= p": 1}[wrong]
    assert found["touch-alpha"][0] == pytest.approx(share, abs=1e-9)
    assert found["touch-share"][0] == pytest.approx(share, abs=.01)


@pytest.mark.parametrize("rule", [name for name in RULES if name != "exact"])
def test_a_broken_rule_settles_at_the_proofs_distance(page, rule):
    "The negative control: nothing brings it to p."
    place = PLACES["doing"]
    show(page, state(0, rule=rule, n=200000))
    off = float(total_variation(touch_law(rule, place.p, place.q), fractions(place.p)))
    found = values(page)
    assert off > .02 and found["touch-exact"][1] == f"{off:.4f}"
    assert found["touch-found"][0] == pytest.approx(off, abs=.005)
    assert f"It settles {off:.4f} away" in page.inner_text(".touch-throw .touch-verdict")
    assert "yours is broken" in page.inner_text(".touch-race .touch-verdict")  # and doesn't promise p
    assert "same distribution" not in page.inner_text(".touch-race .touch-verdict")
    marks = page.locator(".touch-histogram .touch-law")
    boxes = [marks.nth(i).bounding_box() for i in range(6)]
    bars = [page.locator(".touch-histogram .touch-count").nth(i).bounding_box() for i in range(6)]
    assert all(abs(mark["y"] - bar["y"]) < 4 for mark, bar in zip(boxes, bars))


def test_each_throw_is_told(page):
    "Step by step, in words that a screen reader reads out, and with what was drawn."
    show(page, state())
    assert page.locator(".touch-throw [role=status]").inner_text() == "Nothing thrown yet."
    said = []
    for n in range(1, 13):
        page.get_by_role("button", name="×1", exact=True).click()
        said.append(page.locator(".touch-throw [role=status]").inner_text())
        place = PLACES["doing"]
        before, after = (touch_counts("exact", place.p, place.q, k) for k in (n - 1, n))
        word = place.words[int((after[0] - before[0]).argmax())]
        assert said[-1].startswith(f"Throw {n}: the guess is “")
        assert ("kept." in said[-1]) == (after[1] > before[1])
        assert f"“{word}”" in said[-1]
    assert any(": kept." in line for line in said) and any("comes from the residual" in line for line in said)


def middles_of(page) -> dict:
    "Where the measured points lie on the page, by their number, and the dot."
    boxes = page.eval_on_selector_all(".touch-point, .touch-dot", """found => found.map(e => {
      const box = e.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2];
    })""")
    return {"dot": tuple(boxes[0])} | {i: tuple(box) for i, box in enumerate(boxes[1:])}  # the dot lies below them


def test_each_point_can_be_seen_and_says_its_name_before_it_is_pressed(page):
    "None lies under another, and the mouse finds the one that it points at."
    show(page, state())
    data = page.evaluate("fetch('../data/touch.json').then(answer => answer.json())")["points"]
    page.locator(".touch-map").scroll_into_view_if_needed()
    size = page.locator(".touch-point").first.bounding_box()["width"]
    middles = middles_of(page)
    middles.pop("dot")
    for i, (x, y) in middles.items():
        others = [((x - a) ** 2 + (y - b) ** 2) ** .5 for j, (a, b) in middles.items() if j != i]
        assert min(others) > .85 * size, data[i]["name"]
        page.mouse.move(x, y)
        assert page.inner_text(".touch-point-said").startswith(f"{data[i]['name']}, K = {data[i]['K']}:")
    assert now(page)["K"] == 4  # nothing was loaded


def test_a_measured_point_loads_its_numbers(page):
    points = page.evaluate("fetch('../data/touch.json').then(answer => answer.json())")["points"]
    show(page, state())
    for i in (3, 14, 29):
        point = points[i]
        page.locator(".touch-point").nth(i).focus()
        page.keyboard.press("Enter")
        at, found = now(page), values(page)
        assert at["K"] == point["K"] and at["c"] == point["c"]
        assert 1 + at["e"] * at["K"] == pytest.approx(point["v"], abs=5e-4)
        assert found["touch-alpha"][0] == pytest.approx(point["alpha"], abs=6e-4)
        said = page.inner_text(".touch-point-said")
        assert point["name"] in said and f"measured S = {point['measured']:.2f}" in said
        field, middles = page.locator(".touch-field").bounding_box(), middles_of(page)
        wide, high = field["width"], field["height"]
        wanted = field["x"] + wide * point["alpha"], field["y"] + high * (1 - point["c"] ** .5)
        assert middles["dot"] == pytest.approx(wanted, abs=1.5)  # it lies on the map
        assert middles[i] == pytest.approx(wanted, abs=15)  # and its point there, or beside those that lie there too
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Measured: ngram, float32")


def test_the_map_is_dragged_and_the_ladder_clicked(page):
    show(page, state())
    page.locator(".touch-field").scroll_into_view_if_needed()
    box = page.locator(".touch-field").bounding_box()
    page.mouse.move(box["x"] + .8 * box["width"], box["y"] + .5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + .9 * box["width"], box["y"] + .4 * box["height"])
    page.mouse.up()
    at = now(page)
    assert at["c"] == pytest.approx(.36, abs=.01) and values(page)["touch-alpha"][0] == pytest.approx(.9, abs=.01)
    page.get_by_role("button", name="K = 9: S").click()
    assert now(page)["K"] == 9
    finest = page.locator(".touch-finest").get_attribute("aria-label")
    assert finest.startswith(f"K = {Course(9, at['c'], .03).best(values(page)['touch-alpha'][0])}: ")


def test_the_address_keeps_the_state_and_restores_it(page, browser, site):
    at = state(2, dragged(PLACES["boats"].q, 4, 300), "greedy_draft", 1234, 7, .125, .0625)
    show(page, at)
    page.get_by_role("button", name="×100", exact=True).click()
    assert now(page) == {**at, "n": 1334}
    tab = browser.new_page(**STILL)
    tab.goto(page.url)
    tab.wait_for_selector(".touch[data-ready]")
    assert tab.inner_text(".touch") == page.inner_text(".touch")
    tab.goto(f"{site}/use/touch.html#row=99&q=1.2.x&rule=none&n=-5&K=1e9&c=&e=NaN")  # nonsense leads somewhere, too
    tab.reload()
    tab.wait_for_selector(".touch[data-ready]")
    assert [values(tab)[name][0] for name in ("touch-of-K", "touch-n", "touch-of-c")] == [16, 0, .05]
    tab.close()


def test_every_handle_has_a_name_and_says_its_value(page):
    show(page, state())
    names = page.eval_on_selector_all(
        ".touch button, .touch select, .touch input, .touch [role=slider], .touch [role=button], .touch section",
        "found => found.map(e => e.ariaLabel || (e.labels && e.labels.length ? e.labels[0].textContent : e.innerText))",
    )
    assert len(names) > 60 and all(name and name.strip() for name in names)
    bars = page.locator(".touch-drag [role=slider]")
    assert bars.nth(1).get_attribute("aria-label") == "q of “little”"
    assert bars.nth(1).get_attribute("aria-valuetext") == "q 0.192, p 0.203, kept 0.192"
    assert bars.nth(1).get_attribute("aria-valuenow") == "192"


@pytest.mark.parametrize("path", ["use/touch.html", "path/rejection.html", "path/speedup.html", "index.html"])
def test_it_reads_well_in_both_schemes_and_widths(browser, site, path):
    visit = Visit(browser, f"{site}/{path}")
    visit.tab.wait_for_selector(".touch[data-ready]")
    for width, scheme in [(390, "dark"), (390, "light"), (768, "light"), (1440, "dark")]:
        seen = visit.audit(width, scheme)
        assert seen["wide"] <= 0 and seen["faint"] == [] and seen["unlabelled"] == []
    if path == "path/speedup.html":
        visit.tab.get_by_label("K, guesses a round").press("End")
        assert "K = 16" in visit.tab.locator(".touch-ladder [aria-pressed=true]").get_attribute("aria-label")
    else:
        visit.tab.get_by_role("button", name="×100", exact=True).click()
        assert "100 thrown" in visit.tab.inner_text(".touch-throw")
    assert visit.said == [] and all(url.startswith((site, "data:")) for url in visit.fetched)
    visit.tab.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_and_fingers_fit(page, width):
    show(page, state(n=100))
    page.set_viewport_size({"width": width, "height": 900})
    cut = page.eval_on_selector_all(".touch :is(button, label, p, .touch-number, .touch-clock)", """found => found
      .filter(e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline')
      .map(e => e.textContent)""")
    sizes = page.eval_on_selector_all(
        ".touch-column, .touch-button", "found => found.map(e => [e.offsetWidth, e.offsetHeight])"
    )
    page.set_viewport_size({"width": 1440, "height": 900})
    assert cut == [] and min(map(min, sizes)) >= 30


def test_with_less_motion_nothing_falls(page, browser, site):
    page.get_by_role("button", name="×1", exact=True).click()
    name = "e => getComputedStyle(e).animationName"
    assert page.locator(".touch-mark").first.evaluate(name) == "none"
    tab = browser.new_page(reduced_motion="no-preference")
    tab.goto(f"{site}/use/touch.html")
    tab.get_by_role("button", name="×1", exact=True).click()
    assert tab.locator(".touch-mark").first.evaluate(name) == "touch-fall"
    tab.close()


@pytest.mark.parametrize("path", ["use/touch.html", "path/rejection.html", "index.html"])
def test_without_script_or_data_a_picture_stands_there(browser, site, path):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(f"{site}/{path}")
    picture = tab.locator(".touch img")
    assert picture.is_visible() and len(picture.get_attribute("alt")) > 40 and tab.locator(".touch button").count() == 0
    context.close()
    tab = browser.new_page()
    tab.route("**/touch.json", lambda route: route.fulfill(status=404, body="gone"))
    tab.goto(f"{site}/{path}", wait_until="networkidle")
    assert tab.locator(".touch img").is_visible()
    tab.close()


def test_the_script_is_small():
    assert (DOCS / "touch.js").stat().st_size < 30_000
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", (DOCS / "touch.js").read_text(encoding="utf-8"))
