"""Without colours: what becomes of a token, and what p and q share, can still be told apart, on each page as a browser
paints it."""
import io
from itertools import combinations

import pytest

# What stands side by side on each page: a box of the page's own, the kind of its parts, and their names.
TOKENS = ("accepted", "rejected", "corrected", "bonus")
SIDE_BY_SIDE = {
    "tokens of the recorded runs": ("use/recorded.html",
        '<div class="recorded"><div class="recorded-strip">{}</div></div>',
        '<button class="recorded-spot status-{0}">word</button>', (*TOKENS, "target", "never")),
    "their key": ("use/recorded.html", '<div class="recorded"><p class="recorded-key">{}</p></div>',
        '<span class="status-{0}" style="display:inline-block;padding-bottom:4px">word</span>', (*TOKENS, "never")),
    "bars under their microscope": ("use/recorded.html",
        '<div class="recorded"><span class="recorded-bar">{}</span></div>',
        '<span class="recorded-{0}" style="width:60px"></span>', ("overlap", "residual", "excess")),
    "forwards on their lanes": ("use/recorded.html", '<div class="recorded"><div class="recorded-track">{}</div></div>',
        '<span class="recorded-forward recorded-forward-{0} recorded-done" style="position:static;display:inline-block;'
        'width:60px;height:20px"></span>', ("prompt", "kept", "own")),
    "bars that are dragged": ("use/touch.html", '<div class="touch"><div class="touch-column">{}</div></div>',
        '<span class="touch-part touch-{0}" style="position:static;display:inline-block;width:60px;height:40px">'
        '</span>',
        ("p", "kept", "residual", "rejected")),
    "their key, with q": ("use/touch.html", '<div class="touch"><p class="touch-key">{}</p></div>',
        '<span class="touch-swatch touch-{0}" style="width:60px"></span>', ("p", "kept", "residual", "rejected", "q")),
    "what came out": ("use/touch.html", '<div class="touch"><p class="touch-key">{}</p></div>',
        '<span class="touch-swatch touch-{0}" style="width:60px"></span>', ("p", "count", "law")),
    "tokens of the playground": ("use/playground.html",
        '<div class="sp"><div class="sp-scroll"><div>{}</div></div></div>',
        '<span class="sp-token status-{0}">word</span>', (*TOKENS, "target")),
    "bars of its microscope": ("use/playground.html", '<div class="sp"><div class="sp-bar">{}</div></div>',
        '<span class="sp-{0}" style="width:60px"></span>', ("accepted", "residual", "rejected")),
    "its rounds": ("use/playground.html", '<div class="sp"><div class="sp-columns">{}</div></div>',
        '<i class="sp-{0}" style="width:60px;height:40px"></i>', ("p", "accepted")),
    "tokens of the tour's sliders": ("path/tour.html", '<div class="knobs"><div class="knobs-text">{}</div></div>',
        '<span class="status-{0}">word</span>', ("accepted", "corrected")),
}
FAR = 9      # levels of grey, of 255, by which areas must differ on average
MARK = 60    # levels by which a line differs from what it is drawn on; the four fills are within 20 of each other
SHARE = .01  # of the area, that a line must cover


def difference(one, other) -> float:
    "How far two grey pictures are apart, cut to their common size: 1 is enough, by lightness or by a mark."
    size = min(one.width, other.width), min(one.height, other.height)
    a, b = (picture.crop((0, 0, *size)).tobytes() for picture in (one, other))
    apart = [abs(x - y) for x, y in zip(a, b)]
    return max(sum(apart) / len(apart) / FAR, sum(by >= MARK for by in apart) / len(apart) / SHARE)


def painted(tab, box: str, part: str, names) -> dict:
    "Each part as it looks without colours, on the page that the tab shows."
    from PIL import Image
    found = {}
    for name in names:  # one at a time, all in the same place
        tab.evaluate("html => { document.querySelector('main').insertAdjacentHTML('afterbegin', html) }",
                     f'<div id="grey" style="padding:20px">{box.format(part.format(name))}</div>')
        element = tab.locator("#grey [class*='-']:not(:has(*))").first
        found[name] = Image.open(io.BytesIO(element.screenshot())).convert("L")
        tab.evaluate("document.querySelector('#grey').remove()")
    return found


@pytest.fixture(scope="module")
def tab(browser):
    opened = browser.new_page(viewport={"width": 1000, "height": 900}, reduced_motion="reduce", device_scale_factor=2)
    yield opened
    opened.close()


def show(tab, site, page: str, scheme: str) -> None:
    tab.emulate_media(color_scheme=scheme)
    if not tab.url.endswith(page): tab.goto(f"{site}/{page}", wait_until="networkidle")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("what", SIDE_BY_SIDE)
def test_what_stands_side_by_side_differs_in_greys(tab, site, what, scheme):
    page, box, part, names = SIDE_BY_SIDE[what]
    show(tab, site, page, scheme)
    found = painted(tab, box, part, names)
    alike = {(a, b): round(difference(found[a], found[b]), 1) for a, b in combinations(names, 2)}
    assert min(alike.values()) >= 1, {pair: by for pair, by in alike.items() if by < 1}


def test_colours_alone_are_too_little(tab, site):
    "The negative control: the same words on the four fills, without their lines."
    show(tab, site, "use/recorded.html", "light")
    plain = '<span style="padding:4px;background:var(--{0}-fill);color:var(--{0}-ink)" class="x-y">word</span>'
    found = painted(tab, "<p>{}</p>", plain, TOKENS)
    assert min(difference(found[a], found[b]) for a, b in combinations(TOKENS, 2)) < 1
