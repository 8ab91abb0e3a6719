"""The page of recorded runs in a real browser: it shows what was recorded, it keeps still, and it can be sent to
somebody."""
import json
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from helpers import tool
from helpers_site import Visit

DATA = Path(__file__).parents[3] / "docs" / "data" / "recorded.json"
RECORDED = tool("record").unpacked(json.loads(DATA.read_text(encoding="utf-8"))) if DATA.exists() else {}
WIDTHS = (390, 992, 1440)
STILL = dict(reduced_motion="reduce", viewport={"width": 1440, "height": 900})


@pytest.fixture(scope="module")
def page(browser, site):
    "One tab for all: a new address is a new state, without another visit."
    tab = browser.new_page(**STILL)
    tab.said = []
    tab.on("console", lambda message: tab.said.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: tab.said.append(str(error)))
    tab.goto(f"{site}/use/recorded.html")
    tab.wait_for_selector(".recorded[data-ready]")
    yield tab
    assert tab.said == []
    tab.close()


def state(draft="smollm2", K=8, T=0.7, prompt="song", round=0, token=None) -> dict:
    "What the address says."
    at = {"prompt": prompt, "draft": draft, "T": T, "K": K, "round": round}
    return at if token is None else {**at, "token": token}


def show(tab, at: dict, width: int = 1440) -> dict:
    "Lead the tab to a state; returns the recorded run."
    tab.set_viewport_size({"width": width, "height": 900})
    words = "&".join(f"{name}={value:g}" if name == "T" else f"{name}={value}" for name, value in at.items())
    tab.evaluate("words => { location.hash = words }", words)
    tab.wait_for_function(
        "n => document.querySelector('.recorded-where').textContent.startsWith(n ? `round ${n} of` : 'the prompt')",
        arg=at["round"],
    )
    return run_of(at)


def run_of(at: dict) -> dict:
    "A recorded run."
    names = {"prompt": "prompt", "draft": "drafter", "T": "temperature", "K": "K"}
    return next(r for r in RECORDED["runs"] if all(r[theirs] == at[ours] for ours, theirs in names.items()))


def rounds_where(wanted, prompts=("song", "moon")) -> list[tuple[dict, dict]]:
    "All rounds for which `wanted(round)` holds, with the state that shows them."
    return [
        (state(run["drafter"], run["K"], run["temperature"], run["prompt"], n), r)
        for run in RECORDED["runs"] if run["prompt"] in prompts
        for n, r in enumerate(run["rounds"], start=1) if wanted(run, r)
    ]


def text_of(run: dict, rounds: int) -> str:
    "The text after so many rounds, as the loop emitted it."
    tokens = [run["first"]]
    for r in run["rounds"][:rounds]: tokens += [*r["draft"][:r["accepted"]], r["own"]][:r["emitted"]]
    return "".join(RECORDED["tokens"][t] for t in tokens).replace("\n", "⏎")


def kept_text(tab) -> str:
    "The text on the page without what was rejected."
    return tab.eval_on_selector_all(
        ".recorded-text .recorded-spot:not(.status-rejected)", "found => found.map(e => e.textContent).join('')"
    )


def facts(tab) -> dict:
    "The numbers under the microscope."
    return dict(tab.eval_on_selector_all(
        ".recorded-fact", "found => found.map(e => [e.children[0].textContent, e.children[1].textContent])"
    ))


def digits(x) -> str:
    "A number as the page writes it."
    if x is None: return "–"
    return "1" if x >= .9995 else "<0.001" if 0 < x < .0005 else "0" if x == 0 else f"{x:.3f}"


def test_it_opens_on_a_rejected_token(page):
    "Five of eight kept, one rejected and replaced; nothing has been clicked, and the address is the plain one."
    assert page.url.endswith("recorded.html")
    status = page.inner_text(".recorded-status")
    assert "of 8 drafted tokens, 5 accepted" in status and "“Two” in place of “One”" in status
    assert page.locator(".recorded-strip .status-accepted").count() == 5
    assert page.locator(".recorded-strip .status-never").count() == 2
    assert page.locator(".recorded-strip [aria-pressed=true]").get_attribute("class").endswith("status-rejected")
    assert "rejected" in page.inner_text(".recorded-title")
    assert page.locator(".recorded-caption").inner_text().startswith("1 of 6.")


def test_six_captions_lead_through_it(page):
    "Next, Back, by mouse and by keyboard; dismissed, and asked for again."
    caption = page.locator(".recorded-caption")
    titles = [caption.locator("strong").inner_text()]
    chosen = [page.locator(".recorded-strip [aria-pressed=true]").inner_text()]
    for _ in range(5):
        page.locator(".recorded").get_by_role("button", name="Next").click()
        titles.append(caption.locator("strong").inner_text())
        chosen.append(page.locator(".recorded-strip [aria-pressed=true]").inner_text())
    assert [title[:7] for title in titles] == [f"{i} of 6." for i in range(1, 7)] and len(set(titles)) == 6
    assert chosen == ["One", "One", "␣in", "One", "Two", "Two"]  # of those kept the one with the least chance
    assert "6 tokens from one forward" in caption.inner_text()
    page.keyboard.press("ArrowLeft")
    assert caption.inner_text().startswith("5 of 6.") and "corrected" in page.inner_text(".recorded-title")
    page.locator(".recorded").get_by_role("button", name="Back", exact=True).click()
    assert caption.inner_text().startswith("4 of 6.") and page.locator(".recorded-lens.recorded-shown").count() == 1
    r = run_of(state("smollm2-ngram"))["rounds"][3]
    assert f"{digits(r['u'][5])} is not below {digits(r['p'][5])}" in caption.inner_text()  # lookup's q is 1
    page.keyboard.press("Escape")
    assert caption.count() == 0 and page.locator(".recorded-shown").count() == 0
    assert page.evaluate("document.activeElement.textContent") == "Explain a round"  # the keyboard is not lost
    page.locator(".recorded").get_by_role("button", name="Step", exact=True).click()
    page.keyboard.press("Shift+Tab")
    page.locator(".recorded").get_by_role("button", name="Explain a round").press("Enter")
    assert caption.inner_text().startswith("1 of 6.") and "5 accepted" in page.inner_text(".recorded-status")
    page.locator(".recorded").get_by_role("button", name="Close").click()
    assert caption.count() == 0


def test_the_guide_stands_over_nothing_and_goes_when_a_reader_goes_on(browser, site):
    "It stays in sight only once one has asked for its next caption, never over the averages, and a token ends it."
    tab = browser.new_page(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
    tab.goto(f"{site}/use/recorded.html")
    tab.wait_for_selector(".recorded[data-ready]")
    place = "getComputedStyle(document.querySelector('.recorded-guide')).position"
    assert tab.evaluate(place) == "static"
    tab.locator(".recorded").get_by_role("button", name="Next").click()
    assert tab.evaluate(place) == "sticky"
    tab.locator(".recorded-charts").scroll_into_view_if_needed()
    tab.evaluate("document.querySelector('.recorded-charts').scrollIntoView({block: 'start', behavior: 'instant'})")
    guide, charts = (tab.locator(name).bounding_box() for name in (".recorded-guide", ".recorded-charts"))
    assert guide["y"] + guide["height"] <= charts["y"] + 1
    tab.locator(".recorded-strip button").first.click()
    assert tab.locator(".recorded-caption").count() == 0 and tab.evaluate(place) == "static"
    assert tab.locator(".recorded").get_by_role("button", name="Step", exact=True).is_visible()
    tab.close()


def test_the_lanes_have_a_legend(page):
    "Each look of a box stands in it, with what it means."
    show(page, state(round=3))
    look = "all => [...new Set(all.map(e => [...e.classList].find(name => /^recorded-forward-/.test(name))))].sort()"
    boxes, legend = (page.eval_on_selector_all(name, look) for name in (".recorded-forward", ".recorded-swatch"))
    assert boxes == legend == ["recorded-forward-kept", "recorded-forward-own", "recorded-forward-prompt"]
    assert "it reads the prompt" in page.inner_text(".recorded-legend")


# Inside the tour and inside *speculative*

@pytest.fixture(scope="module", params=["tour", "speculative"])
def inside(request, browser, site):
    "A page of the path that holds a box, with a reader in front of the box."
    tab = browser.new_page(**STILL)
    tab.said = []
    tab.on("console", lambda message: tab.said.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: tab.said.append(str(error)))
    tab.goto(f"{site}/path/{request.param}.html")
    assert tab.locator(".recorded img").count() == 1  # a picture, until one comes near
    tab.locator(".recorded").scroll_into_view_if_needed()
    tab.wait_for_selector(".recorded[data-ready]")
    yield tab
    assert tab.said == []
    tab.close()


def opened(tab) -> dict:
    "The state at which a box opens."
    asked = {name: value for name, (value,) in parse_qs(tab.get_attribute(".recorded", "data-open")).items()}
    return state(asked["draft"], int(asked["K"]), float(asked["T"]), asked["prompt"], int(asked["round"]))


def test_a_box_on_the_path_opens_on_a_rejected_token(inside):
    "And leaves the address to its page."
    at = opened(inside)
    r = run_of(at)["rounds"][at["round"] - 1]
    assert inside.locator(".recorded-strip [aria-pressed=true]").get_attribute("class").endswith("status-rejected")
    assert facts(inside)["u, drawn"] == digits(r["u"][r["accepted"]])
    box = inside.locator(".recorded")
    assert not box.get_by_role("button", name="Step", exact=True).is_visible()  # one way on at a time
    box.get_by_role("button", name="Close").click()
    before = inside.inner_text(".recorded-where")
    assert before.startswith(f"round {at['round']} of")
    box.get_by_role("button", name="Step", exact=True).click()
    assert inside.inner_text(".recorded-where") != before and "#" not in inside.url
    box.get_by_role("button", name="Step back", exact=True).click()
    assert inside.locator(".recorded-charts").count() == 0  # the averages stand on the page of their own
    assert inside.locator(".recorded-more a").get_attribute("href").endswith(
        f"use/recorded.html#prompt={at['prompt']}&draft={at['draft']}&T={at['T']:g}&K={at['K']}&round={at['round']}"
        f"&token={r['accepted']}")


# Where the part stands that a caption speaks of: from below the guide to the end of the window
STANDS = """() => {
  const box = (selector) => document.querySelector(selector).getBoundingClientRect();
  const { top, bottom } = box('.recorded-shown'), guide = box('.recorded-guide');
  return { hidden: guide.bottom - top, below: bottom - innerHeight, room: innerHeight - guide.bottom - (bottom - top),
    guide: guide.top };
}"""


@pytest.mark.parametrize("width", [390, 1440])
def test_the_guide_leads_to_what_it_speaks_of(inside, width):
    "Each caption and the part that it is about are in sight together, on a phone as well."
    inside.set_viewport_size({"width": width, "height": 844})
    box = inside.locator(".recorded")
    reopen = box.get_by_role("button", name="Explain a round")
    if reopen.count(): reopen.click()
    caption, seen = inside.locator(".recorded-caption"), []
    for i in range(6):
        assert caption.inner_text().startswith(f"{i + 1} of 6.")
        if i:
            at = inside.evaluate(STANDS)
            assert at["guide"] >= 0 and at["hidden"] <= 0, (i, at)
            assert at["below"] <= 1 or at["room"] < 0, (i, at)
            seen.append(inside.evaluate("scrollY"))
        box.get_by_role("button", name=re.compile("^(Next|Done)$")).click()
    assert caption.count() == 0 and (width > 390 or len(set(seen)) > 1)  # it did scroll


@pytest.mark.parametrize("width, scheme", [(390, "dark"), (360, "light"), (1280, "dark")])
def test_a_box_on_the_path_fits_its_page(browser, site, width, scheme):
    visit = Visit(browser, f"{site}/path/tour.html")
    visit.tab.locator(".recorded").scroll_into_view_if_needed()
    visit.tab.wait_for_selector(".recorded[data-ready]")
    visit.tab.wait_for_selector(".knobs[data-ready]")
    seen = visit.audit(width, scheme)
    assert seen["wide"] <= 0 and seen["faint"] == seen["unlabelled"] == seen["skipped"] == []
    assert visit.said == []
    visit.tab.close()


@pytest.mark.parametrize("draft", ["smollm2", "smollm2-skip", "smollm2-ngram"])
def test_every_choice_shows_what_was_recorded(page, draft):
    page.locator(".recorded").get_by_label("Draft", exact=True).select_option(draft)
    for prompt, T, K in [("song", 0, 2), ("moon", .7, 4), ("moon", 1, 8)]:
        page.locator(".recorded").get_by_label("Prompt", exact=True).select_option(prompt)
        page.locator(".recorded").get_by_label("Temperature", exact=True).select_option(str(T))
        page.locator(".recorded").get_by_label("K, guesses").select_option(str(K))
        run = run_of(state(draft, K, T, prompt))
        slider = page.locator(".recorded").get_by_label("Round", exact=True)
        slider.press("Home")
        assert kept_text(page) == text_of(run, 0)
        for n in (1, 2):
            page.locator(".recorded").get_by_role("button", name="Step", exact=True).click()
            r, status = run["rounds"][n - 1], page.inner_text(".recorded-status")
            assert kept_text(page) == text_of(run, n) and status.startswith(f"Round {n}: ")
            said = sum(x["emitted"] for x in run["rounds"][:n])
            assert f"So far {said + 1} tokens: the first with the prompt, {said} in {n} round" in status
            assert page.locator(".recorded-strip .status-accepted").count() == min(r["accepted"], r["emitted"])
            assert page.locator(".recorded-strip .status-never").count() == max(0, len(r["draft"]) - r["accepted"] - 1)
        slider.press("End")
        assert kept_text(page) == text_of(run, len(run["rounds"]))
        assert page.locator(".recorded").get_by_role("button", name="Step", exact=True).is_disabled()


def test_a_token_opens_its_microscope(page):
    "p, q, min(1, p/q), the draw and the residual, as they were recorded; in the text, and in the row of the round."
    at, r = rounds_where(lambda run, r: run["temperature"] == 1 and 2 <= r["accepted"] < len(r["draft"]) - 1)[0]
    run = show(page, {**at, "round": len(run_of(at)["rounds"])})
    for i in range(r["accepted"] + 1):
        page.click(f".recorded-text [data-round='{at['round']}'][data-token='{i}']")
        p, q = r["p"][i], r["q"][i]
        assert facts(page) == {"p, target": digits(p), "q, draft": digits(q), "min(1, p/q)": digits(min(1, p / q)),
                               "u, drawn": digits(r["u"][i]), "residual": digits(max(0, p - q))}
        assert ("is below" if i < r["accepted"] else "is not below") in page.inner_text(".recorded-why")
        shown = page.locator(".recorded-lens tbody tr").all()
        assert len(shown) == 5 and sum(bool(row.inner_text().strip()) for row in shown) == len(r["positions"][i][1])
    page.click(f".recorded-text [data-round='{at['round']}'][data-token='{r['accepted'] + 1}']")
    assert f"its share is {digits(r['chance'])}" in page.inner_text(".recorded-why")
    assert facts(page)["u, drawn"] == digits(r["drawn"])
    page.click(f".recorded-strip [data-token='{r['accepted'] + 2}']")
    assert "thrown away untried" in page.inner_text(".recorded-why") and set(facts(page).values()) == {"–"}
    assert run["K"] == at["K"]


def test_arrow_keys_move_from_token_to_token(page):
    "One stop of the Tab key for the whole text, and each token has a name."
    show(page, state(round=4, token=0))
    assert page.locator(".recorded-strip button[tabindex='0']").count() == 1
    page.locator(".recorded-strip button[tabindex='0']").focus()
    for _ in range(2): page.keyboard.press("ArrowRight")
    chosen = page.locator(".recorded-strip [aria-pressed=true]")
    assert chosen.get_attribute("data-token") == "2" and "token=2" in page.url
    assert page.evaluate("document.activeElement.dataset.token") == "2"
    assert re.search(r": .*(accepted|rejected|target)", chosen.get_attribute("aria-label"))
    page.keyboard.press("ArrowLeft")
    assert "token=1" in page.url


def test_nothing_left_to_reject_is_said_after_a_full_draft_only(page):
    plain = rounds_where(lambda run, r: not r["draft"])[:2]
    full = rounds_where(lambda run, r: r["draft"] and r["accepted"] == len(r["draft"]) == r["emitted"] - 1)[:2]
    for at, _ in plain:
        show(page, at)
        why = page.inner_text(".recorded-why")
        assert "Nothing was drafted" in why and "left to reject" not in why
    for at, r in full:
        show(page, {**at, "token": len(r["draft"])})
        assert "nothing was left to reject" in page.inner_text(".recorded-why")
    assert plain and full


def test_it_says_why_the_first_token_comes_with_the_prompt(page):
    for at in (state(), state(round=3), state("smollm2-skip", 4, 1, "moon", 5)):
        run = show(page, at)
        total, n = sum(r["emitted"] for r in run["rounds"]), len(run["rounds"])
        sentence = f"{total + 1} tokens in {n} rounds, {total / n:.2f} a round, for the first token comes with the"
        assert f"{sentence} prompt" in page.inner_text(".recorded-count")


@pytest.mark.parametrize("at", [
    pytest.param(state("smollm2", 8, 0, "song", 2), id="a faster run"),
    pytest.param(state("smollm2-skip", 8, 1, "moon", 2), id="a slower run"),
])
def test_both_lanes_have_one_axis_of_time(page, at):
    "A pixel is as long above as below, and each box as wide as its recorded time."
    run = show(page, at)
    plain = next(p for p in RECORDED["plain"] if (p["prompt"], p["temperature"]) == (at["prompt"], at["T"]))
    measure = "found => found.map(e => [e.getBoundingClientRect().left, e.getBoundingClientRect().right])"
    track = page.locator(".recorded-track").first.bounding_box()
    scale = track["width"] / max(plain["ends"][-1], run["ends"][-1])
    for kind, ends in [("plain", plain["ends"]), ("speculative", run["ends"])]:
        boxes = page.eval_on_selector_all(f".recorded-lane-{kind} .recorded-forward", measure)
        assert len(boxes) == len(ends)
        for (left, right), begin, end in zip(boxes, [0, *ends], ends):
            assert left - track["x"] == pytest.approx(begin * scale, abs=1.5)
            assert right - track["x"] == pytest.approx(end * scale, abs=1.5)
    now, said = run["ends"][2], sum(e <= run["ends"][2] for e in plain["ends"])
    assert page.inner_text(".recorded-lane-plain .recorded-clock").startswith(f"{said} token")
    assert f"at {now:.2f} s" in page.inner_text(".recorded-lane-speculative .recorded-clock")
    assert page.locator(".recorded-lane-plain .recorded-done").count() == said


def test_the_address_keeps_the_state_and_restores_it(page, browser, site):
    at, _ = rounds_where(lambda run, r: run["K"] == 4 and 2 <= r["accepted"] < len(r["draft"]), ["moon"])[-1]
    show(page, state())
    page.locator(".recorded").get_by_label("Prompt", exact=True).select_option("moon")
    page.locator(".recorded").get_by_label("Draft", exact=True).select_option(at["draft"])
    page.locator(".recorded").get_by_label("K, guesses").select_option("4")
    page.locator(".recorded").get_by_label("Temperature", exact=True).select_option(f"{at['T']:g}")
    slider = page.locator(".recorded").get_by_label("Round", exact=True)
    slider.press("Home")
    for _ in range(at["round"]): slider.press("ArrowRight")
    page.click(".recorded-strip [data-token='1']")
    found = {name: value for name, (value,) in parse_qs(urlsplit(page.url).fragment).items()}
    assert found == {**{k: str(v) for k, v in at.items()}, "T": f"{at['T']:g}", "token": "1"}
    tab = browser.new_page(**STILL)
    tab.goto(page.url)
    tab.wait_for_selector(".recorded[data-ready]")
    for selector in (".recorded-status", ".recorded-title", ".recorded-text", ".recorded-lane-plain"):
        assert tab.inner_text(selector) == page.inner_text(selector)
    assert tab.locator(".recorded-caption").count() == 0  # whoever was sent here came for this round
    tab.goto(f"{site}/use/recorded.html#prompt=none&K=5&T=x&round=999&token=-3")  # nonsense leads somewhere, too
    tab.reload()
    tab.wait_for_selector(".recorded[data-ready]")
    assert re.match(r"round (\d+) of \1$", tab.inner_text(".recorded-where"))
    tab.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_controls_stay_in_view(page, width):
    "While the microscope is read, the buttons are there, and don't cover it all."
    show(page, state(round=4), width)
    page.evaluate("document.querySelector('.recorded-lens').scrollIntoView({block: 'end', behavior: 'instant'})")
    for name in ("Step", "Play", "Step back"):
        box = page.locator(".recorded").get_by_role("button", name=name, exact=True).bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] <= 300
    assert page.locator(".recorded-controls").bounding_box()["height"] < 260
    page.evaluate("scrollTo({top: 0, behavior: 'instant'})")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_box_keeps_its_height(page, width):
    "Nothing below moves while a reader steps, or goes from token to token."
    for at in (state("smollm2-ngram", 8, .7, "song"), state("smollm2-skip", 8, 1, "moon")):
        run = show(page, at, width)
        seen = page.evaluate("""rounds => {
          const seen = new Set();
          for (let n = 0; n <= rounds; n++) {
            for (let i = 0; i < document.querySelectorAll('.recorded-strip button').length; i++) {
              document.querySelectorAll('.recorded-strip button')[i].click();
              const parts = document.querySelectorAll('.recorded-stage > *, .recorded > *');
              seen.add([...parts].map(e => Math.round(e.offsetTop)).join());
            }
            document.querySelector('.recorded-step').click();
          }
          return [...seen];
        }""", len(run["rounds"]))
        assert len(seen) == 1
        assert page.inner_text(".recorded-where").startswith(f"round {len(run['rounds'])} of")


@pytest.mark.parametrize("width", WIDTHS)
def test_labels_are_whole_and_nothing_scrolls_sideways(page, width):
    show(page, state("smollm2-skip", 8, 1, "moon", 3), width)
    cut = page.evaluate("""() => {
      const pen = document.createElement('canvas').getContext('2d'), cut = [];
      for (const menu of document.querySelectorAll('.recorded select')) {
        const style = getComputedStyle(menu);
        pen.font = `${style.fontSize} ${style.fontFamily}`;
        for (const option of menu.options)
          if (pen.measureText(option.text).width + 28 > menu.clientWidth) cut.push(option.text);
      }
      const words = ['label', '.recorded-where', 'dt', 'dd', '.recorded-clock', '.recorded-head strong', 'button',
        '.recorded-lens thead th', '.recorded-lens td', '.recorded-charts th', '.recorded-charts td'];
      for (const e of document.querySelectorAll(`.recorded :is(${words.join()})`))
        if (e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline') cut.push(e.textContent);
      return cut;
    }""")
    assert cut == []
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


def test_play_goes_on_by_itself_and_can_be_stopped(browser, site):
    "From the prompt on, in slow motion; the clock of both lanes runs, and a press holds it."
    tab = browser.new_page(reduced_motion="no-preference")
    tab.goto(f"{site}/use/recorded.html#prompt=song&draft=smollm2&T=0&K=8&round=0")
    tab.wait_for_selector(".recorded[data-ready]")
    assert tab.inner_text(".recorded-play") == "Play"  # nothing moves before it is asked for
    tab.click(".recorded-play")
    tab.wait_for_function("() => !document.querySelector('.recorded-where').textContent.startsWith('the prompt')")
    tab.click(".recorded-play")
    before = tab.inner_text(".recorded-lane-plain .recorded-clock"), tab.inner_text(".recorded-where")
    tab.wait_for_timeout(300)
    assert before == (tab.inner_text(".recorded-lane-plain .recorded-clock"), tab.inner_text(".recorded-where"))
    assert tab.inner_text(".recorded-play") == "Play"
    tab.close()


def test_with_less_motion_play_goes_from_round_to_round(page):
    "The clock stands at the end of a round, nowhere between; after the last it is over."
    run = show(page, state(T=0))
    last = len(run["rounds"])
    show(page, state(T=0, round=last - 1))
    page.locator(".recorded").get_by_role("button", name="Play").click()
    page.wait_for_timeout(400)
    assert f"at {run['ends'][last - 1]:.2f} s" in page.inner_text(".recorded-lane-speculative .recorded-clock")
    where = "n => document.querySelector('.recorded-where').textContent.startsWith(`round ${n}`)"
    page.wait_for_function(where, arg=last)
    assert page.inner_text(".recorded-play") == "Play"


def test_averages_come_with_their_spread(page):
    "A mean, its error and a band in each figure; the words say over how many texts."
    show(page, state("smollm2-skip", 4, .7, "moon", 1))
    cell = next(c for c in RECORDED["cells"]
                if (c["drafter"], c["prompt"], c["temperature"], c["K"]) == ("smollm2-skip", "all", .7, 4))
    mean, error, low, high = cell["tau"]
    summary = page.inner_text(".recorded-summary")
    assert f"{mean:.2f} tokens a round on average (standard error {error:.2f})" in summary
    assert f"over {cell['texts']} texts" in summary and f"between {low:.2f} and {high:.2f}" in summary
    figures = page.locator(".recorded-charts svg")
    assert figures.count() == 3
    assert f"K 4: {mean:.2f} ({low:.2f} to {high:.2f})" in figures.nth(0).get_attribute("aria-label")
    for i in range(3):
        assert figures.nth(i).locator(".recorded-band").bounding_box()["height"] > 10
        assert figures.nth(i).locator(".recorded-error").count() >= 4
        assert figures.nth(i).locator("circle.recorded-chosen").count() == 1
    kept = page.locator(".recorded-charts table tbody tr").nth(1).inner_text()
    assert f"{cell['kept'][1]} of {cell['tried'][1]}" in kept


def test_every_handle_has_a_name(page):
    names = page.eval_on_selector_all(
        ".recorded button, .recorded select, .recorded input, .recorded [role=toolbar], .recorded [role=region]",
        "found => found.map(e => e.ariaLabel || (e.labels && e.labels.length ? e.labels[0].textContent : e.innerText))",
    )
    assert len(names) > 10 and all(name and name.strip() for name in names)
    slider = page.locator(".recorded").get_by_label("Round", exact=True)
    slider.press("End")
    assert re.match(r"round \d+ of \d+", slider.get_attribute("aria-valuetext"))
