"""The playground's panel as a reader meets it: JupyterLab runs its cell, Chromium shows it, and the keyboard moves its
sliders.

With SPECDEC_SHOTS=folder, pictures of the panel (light and dark) are saved there.
"""
import os
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers import tool

LIMIT = 90_000  # ms, for what waits for a model on a busy machine


@pytest.fixture(scope="module")
def page(browser):
    "The panel, its model loaded."
    if find_spec("jupyterlab") is None: pytest.skip("no JupyterLab, so no browser test ran: make setup installs it")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the kernel: other processes may be busy
    screenshot = tool("screenshot")
    with screenshot.lab() as address:
        opened = browser.new_page(viewport=dict(width=1440, height=1150))
        opened.set_default_timeout(LIMIT)
        opened.problems, opened.elsewhere = [], []
        opened.on("console", lambda message: opened.problems.append(message.text) if message.type == "error" else None)
        opened.on("pageerror", lambda error: opened.problems.append(str(error)))
        opened.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((address.partition("/doc")[0], "data:", "blob:", "ws://127.0.0.1"))
                else opened.elsewhere.append(request.url)
            ),
        )
        screenshot.show_panel(opened, address)
        until(opened, "status", "Ready.")
        yield opened
        opened.close()


def view(page, name: str) -> str:
    "The text of a part of the panel."
    selector = {
        "status": ".sp-status", "error": ".sp-error", "text": ".sp-scroll",
        "speedup": ".sp-figures svg",
    }[name]
    return page.evaluate("s => document.querySelector(s)?.textContent ?? ''", selector)


def until(page, name: str, words: str) -> None:
    "Wait until a part of the panel says so."
    selector = {"status": ".sp-status", "error": ".sp-error"}[name]
    page.wait_for_function(
        "([s, words]) => (document.querySelector(s)?.textContent ?? '').includes(words)", arg=[selector, words],
        timeout=LIMIT,
    )


def press(page, name: str) -> None: page.locator(".jp-OutputArea").get_by_role("button", name=name).first.click()


def slide(page, label: str, key: str, times: int = 1) -> str:
    "Move a slider with the keyboard; what it reads then."
    row = page.locator(".widget-hslider").filter(has=page.get_by_text(label, exact=True))
    before = row.locator(".widget-readout").inner_text()
    row.locator(".noUi-handle").focus()
    for _ in range(times): page.keyboard.press(key)
    page.wait_for_function(
        "([e, before]) => e.textContent != before", arg=[row.locator(".widget-readout").element_handle(), before]
    )
    return row.locator(".widget-readout").inner_text()


def picture(page, name: str) -> None:
    if os.environ.get("SPECDEC_SHOTS"): page.screenshot(path=Path(os.environ["SPECDEC_SHOTS"]) / f"{name}.png")


def test_temperature_shows_what_it_does_before_a_run(page):
    page.wait_for_function("document.querySelector('.sp-micro').textContent.includes('Before a run')")
    def likeliest(): return float(page.locator(".sp-micro tbody tr").first.locator("td").nth(1).inner_text())
    before = likeliest()
    slide(page, "Temperature", "ArrowRight", 5)
    page.wait_for_function("before => Number(document.querySelector('.sp-micro tbody td:nth-child(3)').textContent)"
                           " < before", arg=before)
    slide(page, "Temperature", "ArrowLeft", 5)
    page.wait_for_function("before => Number(document.querySelector('.sp-micro tbody td:nth-child(3)').textContent)"
                           " === before", arg=before)


def test_the_menu_folds_what_would_have_to_be_downloaded(page):
    menu = page.locator(".jp-OutputArea select").nth(1)
    few = menu.locator("option").all_inner_texts()
    assert not [name for name in few if "not on this machine" in name] and "smollm2" in few
    page.get_by_label("All drafters").check()
    page.wait_for_function("n => document.querySelectorAll('.jp-OutputArea select')[1].options.length > n",
                           arg=len(few))
    page.get_by_label("All drafters").uncheck()
    page.wait_for_function("n => document.querySelectorAll('.jp-OutputArea select')[1].options.length === n",
                           arg=len(few))


def test_run_shows_the_first_token_at_once_and_the_text_token_by_token(page):
    start = time.perf_counter()
    press(page, "Run")
    page.wait_for_selector(".sp-token")
    first = time.perf_counter() - start
    print(f"first token {first:.2f} s after the click")
    assert first < 2  # half a second on a quiet machine
    page.wait_for_function("document.querySelectorAll('.sp-token').length > 12")
    press(page, "Stop")
    until(page, "status", "Stopped.")
    page.wait_for_timeout(1000)  # what was on its way to the page has arrived
    count = page.locator(".sp-token").count()
    page.wait_for_timeout(300)
    assert page.locator(".sp-token").count() == count < 96  # it stands still, in the middle of the text
    press(page, "Run")
    until(page, "status", "Measuring")
    page.wait_for_function("document.querySelector('.sp-tiles').textContent.includes('×')")  # the measured speed-up
    page.wait_for_function("!document.querySelector('.sp-status').textContent.includes('…')")
    assert page.locator(".sp-token").count() > count
    assert page.locator("del.sp-token").count() and page.locator("ins.sp-token").count()


def drag(page, label: str, by: int) -> str:
    "Drag a slider's handle by so many pixels; what it reads then."
    row = page.locator(".widget-hslider").filter(has=page.get_by_text(label, exact=True))
    row.locator(".noUi-handle").scroll_into_view_if_needed()
    box, before = row.locator(".noUi-handle").bounding_box(), row.locator(".widget-readout").inner_text()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + by, y, steps=8)
    page.mouse.up()
    page.wait_for_function(
        "([e, before]) => e.textContent != before", arg=[row.locator(".widget-readout").element_handle(), before]
    )
    return row.locator(".widget-readout").inner_text()


def test_sliders_move_with_the_keyboard_and_the_figures_follow(page):
    page.wait_for_selector(".sp-figures svg")  # painted a moment after the last measurement
    text, figure = view(page, "text"), view(page, "speedup")
    K = slide(page, "K", "ArrowRight", 3)
    assert K == "8"
    page.wait_for_function(
        "before => (document.querySelector('.sp-figures svg')?.textContent ?? before) != before", arg=figure
    )
    assert view(page, "text") == text  # it was written before
    assert slide(page, "Temperature", "ArrowRight", 8) == "1.5"
    press(page, "Run")
    page.wait_for_function("before => document.querySelector('.sp-scroll').textContent != before", arg=text)
    page.wait_for_function("document.querySelectorAll('.sp-token').length > 5")
    assert slide(page, "K", "ArrowLeft", 6) == "2"  # while it writes
    page.wait_for_function("!document.querySelector('.sp-status').textContent.includes('…')")
    assert view(page, "text") != text
    assert slide(page, "K", "ArrowRight", 2) == "4"  # and when it has been written
    page.wait_for_function("document.querySelector('.sp-figures svg').textContent.includes('not run yet')")
    figure = view(page, "speedup")
    cut = page.eval_on_selector_all(".sp-figures svg text", """all => all.filter(e => {
      const {x, width} = e.getBBox();
      return x < 0 || x + width > 420;
    }).map(e => e.textContent)""")
    assert cut == [] and "not run yet" in figure  # where you are, and where you were
    assert int(drag(page, "K", 40)) > 4  # and with the mouse
    page.wait_for_function(
        "before => (document.querySelector('.sp-figures svg')?.textContent ?? before) != before", arg=figure
    )


def test_tokens_explain_themselves_to_mouse_and_keyboard(page):

    def shown():
        return page.evaluate(
            "getComputedStyle(document.querySelector('.sp-token:hover, .sp-token:focus'), '::after').content"
        )

    page.locator("del.sp-token").first.hover()
    assert all(name in shown() for name in ("p = ", "q = ", "u = "))
    page.mouse.move(2, 2)
    page.locator(".sp-token").first.focus()
    first = shown()
    page.keyboard.press("ArrowRight")
    assert (
        page.evaluate("document.activeElement.classList.contains('sp-token')")
        and shown() != first
        and "p = " in shown()
    )


def test_a_click_and_the_enter_key_put_a_token_under_the_microscope(page):
    def shown(token, act):
        n, i = token.get_attribute("data-at").split(",")
        act(token)
        page.wait_for_function(
            "([n, i]) => { const told = document.querySelector('.sp-micro').textContent;"
            " return told.includes(`Round ${n}:`) && told.includes(`position ${i} of`); }", arg=[n, i])
    shown(page.locator("del.sp-token").nth(1), lambda token: token.click())
    shown(page.locator("ins.sp-token").first, lambda token: token.press("Enter"))


def test_the_final_text_has_nothing_struck_out(page):
    struck = page.locator("del.sp-token").count()
    page.get_by_label("Final text only").check()
    page.wait_for_function("!document.querySelector('del.sp-token')")
    page.get_by_label("Final text only").uncheck()
    page.wait_for_function("n => document.querySelectorAll('del.sp-token').length === n", arg=struck)


def test_the_microscope_moves(page):
    def told(): return page.locator(".sp-micro").inner_text()
    before = told()
    slide(page, "Round", "ArrowLeft", 2)
    page.wait_for_function("before => document.querySelector('.sp-micro').innerText != before", arg=before)
    assert page.locator(".sp-micro table").count() == 1


def test_errors_are_shown_in_the_panel_and_go_away(page):
    prompt = page.locator("textarea")
    kept = prompt.input_value()
    prompt.fill("")
    press(page, "Run")
    until(page, "error", "The prompt is empty")
    prompt.fill(kept)
    page.wait_for_function("!document.querySelector('.sp-error')")
    assert slide(page, "K", "Home") == "1"  # no K is offered that would be refused
    assert slide(page, "K", "ArrowRight", 3) == "4"
    assert not page.locator(".sp-error").count()
    press(page, "Reset")
    page.wait_for_function("!document.querySelector('.sp-token')")


def test_handles_have_the_names_of_their_labels(page):
    names = page.evaluate("[...document.querySelectorAll('.noUi-handle')].map(handle => handle.ariaLabel)")
    assert names == ["K", "Temperature", "Top-p", "Tokens", "Round", "Position"]
    assert page.get_by_role("slider", name="Temperature").count() == 1


def test_another_drafter_and_a_step(page):
    press(page, "Step")
    page.wait_for_selector(".sp-token")
    page.wait_for_function("!document.querySelector('.sp-status').textContent.includes('…')")
    page.locator(".jp-OutputArea select").nth(1).select_option("smollm2-skip")
    page.wait_for_selector(".sp-old .sp-note")  # the figures are still those of the drafter before
    assert "by smollm2-skip" in page.locator(".sp-note").inner_text()
    press(page, "Step")
    page.wait_for_function("!document.querySelector('.sp-old')")
    page.wait_for_selector(".sp-token")
    page.wait_for_function("!document.querySelector('.sp-status').textContent.includes('…')")
    press(page, "Step")
    page.wait_for_function("document.querySelectorAll('.sp-token').length > 1")
    page.wait_for_function("document.querySelector('.sp-micro').textContent.includes('q, the draft')")


def test_every_width_and_both_themes_and_nothing_from_elsewhere(page):
    page.locator(".jp-OutputArea select").nth(1).select_option("smollm2")
    press(page, "Run")
    page.wait_for_function("document.querySelectorAll('.sp-token').length > 40")
    press(page, "Stop")
    until(page, "status", "Stopped.")
    page.wait_for_timeout(400)  # the last painting
    colours = {}
    for name, width, height, scheme in [
        ("wide", 1440, 1150, "Light"), ("wide_dark", 1440, 1150, "Dark"), ("middle", 1000, 1700, "Dark"),
    ]:
        page.set_viewport_size(dict(width=width, height=height))
        page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
                      f"JupyterLab {scheme}")
        page.wait_for_function("dark => document.body.dataset.jpThemeLight === String(!dark)", arg=scheme == "Dark")
        page.wait_for_timeout(300)
        picture(page, name)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        right = "Math.max(...[...document.querySelectorAll('.sp-table')].map(e => e.getBoundingClientRect().right))"
        assert page.evaluate(f"{right} <= innerWidth"), name
        colours[scheme] = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('.sp')).color]"
        )
    assert colours["Light"] != colours["Dark"]
    assert page.elsewhere == [] and page.problems == []
